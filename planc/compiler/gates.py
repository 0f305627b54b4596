"""The gates: in goes a config, out comes how far its lifted graph is from transformers' module, or the finding.

A small copy of the model with random float32 weights runs both ways, on more tokens than the trace saw and than any
window holds, at irregular positions (a constant shift is invisible to rotary). NaN fails every comparison.
"""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from planc.compiler import hooks, regime
from planc.compiler.ir import interp
from planc.compiler.ir.graph import Graph
from planc.compiler.ir.recipe import load
from planc.compiler.lift import lift
from planc.compiler.refusal import NEXT_STEP, refused
from planc.compiler.shrink import shrunk
from planc.compiler.source.base import most_positions, new_model, one_line
from planc.compiler.trace import has_interface, set_experts, trace
from planc.compiler.traced import Traced
from planc.errors import PlancError

TOKENS = 70  # beyond 64-token chunk loops and beyond the windows of a shrunk config
TOLERANCE = 1e-5  # of the largest logit
LOCAL_TOLERANCE = 1e-4
LARGEST = 20_000_000  # parameters of a model that is still tested when it cannot be shrunk
_PREFIX = 40  # tokens of the first of two chunks
_GAINS = (0.7, 0.4, 0.2, 0.1)  # sizes of random weights: the next is tried when logits are not steady
_MOST_NOISE = 1e-4
_NOISE = 8.0  # how many times float32's own distance from float64 a graph may be off


class _UnsteadyError(PlancError):
    """The model's own rounding is larger than any error that should be found."""


def self_test(config: PretrainedConfig, trust_remote_code: bool = False, limit: int | None = None) -> float:
    """Largest error of the lifted graph's logits, relative to the largest logit, on a shrunk copy of the model.

    `trust_remote_code` lets a config build a model from its own code; `limit` is the longest sequence to be served.
    PlancError names the finding: tokens that mix outside of attention, or logits that differ.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(0)
        small = _small(config, trust_remote_code, limit)
        with regime.fixed(small.model, small.traced.limit):
            for gain in _GAINS:
                _randomize(small.model, gain)
                try:
                    return _check(small)
                except _UnsteadyError as e:  # chaotic weights hide an error behind rounding: smaller ones do not
                    unsteady = e
            raise unsteady


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers' advice about a config is for the user's own, not for a shrunk copy of it."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@dataclass(frozen=True)
class Small:
    """A model that can be run here, its trace, and its lifted graph."""

    model: PreTrainedModel
    traced: Traced
    graph: Graph


def _check(small: Small) -> float:
    model, graph = small.model, small.graph
    ids, positions = _prompt(model.config, small.traced.limit)
    check_counting(model, ids)
    if not has_interface(model):
        check_default(model, ids, positions)
    if not small.traced.numbers_tokens:
        if has_interface(model):
            check_local(model, ids, positions)
        return check_logits(model, graph, ids, positions)
    check_continues(model, ids)
    return check_logits(model, graph, ids, torch.arange(ids.shape[1])[None])


def _small(config: PretrainedConfig, trust_remote_code: bool, limit: int | None) -> Small:
    """The smallest copy that transformers can build and that lifts, with random weights."""
    failure: PlancError | None = None
    for candidate in (*shrunk(config), config):
        try:
            empty = new_model(candidate, trust_remote_code=trust_remote_code)
            if sum(p.numel() for p in empty.parameters()) > LARGEST:
                continue
            model = random_model(candidate, trust_remote_code)
            return _lifted(candidate, model, trust_remote_code, limit)
        except PlancError as e:
            failure = failure or e
    raise failure or refused("self-test: the model cannot be shrunk to a size that can be run here")


def random_model(config: PretrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """The eager float32 model with weights that leave no part of it trivial."""
    model = new_model(config, device="cpu", trust_remote_code=trust_remote_code)
    set_experts(model, "eager")
    for parameter in model.parameters():
        if parameter.dim() < 2:  # around its own size: some models scale a small constant up
            size = float(parameter.abs().max()) if parameter.numel() else 0.0
            parameter.add_(0.2 * (size or 1.0) * torch.randn_like(parameter))
    _randomize(model, _GAINS[0])
    return model


def _randomize(model: nn.Module, gain: float) -> None:
    """Fresh matrices whose products have `gain` times the size of what goes in."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(gain * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)


def _lifted(config: PretrainedConfig, model: PreTrainedModel, trust_remote_code: bool, limit: int | None) -> Small:
    recipes = {name: load(name, "f32", tuple(t.shape)) for name, t in model.state_dict().items()}
    known = [n for n in (limit, most_positions(config)) if n]
    traced = trace(config, limit=min(known, default=None), trust_remote_code=trust_remote_code)
    return Small(model, traced, lift(traced, recipes))


def _prompt(config: PretrainedConfig, limit: int) -> tuple[Tensor, Tensor]:
    """Random ids and increasing positions with gaps, both [1, tokens]."""
    limit = min(limit, most_positions(config) or limit)
    tokens = min(TOKENS, limit)
    positions = torch.randperm(min(limit, 4 * tokens))[:tokens].sort().values
    return torch.randint(3, int(config.get_text_config().vocab_size), (1, tokens)), positions[None]


def _run(model: nn.Module, ids: Tensor, positions: Tensor | None, **others: Any) -> Any:
    """transformers' output. Without the mask of ones, gaps in positions would mean new sequences."""
    accepted = inspect.signature(model.forward).parameters
    given: dict[str, Any] = {"input_ids": ids, "use_cache": False} | others
    if positions is None:
        accepted = accepted.keys() - {"position_ids"}  # type: ignore[assignment]
    seen = ids.shape[1] + (0 if "past_key_values" not in others else _PREFIX)
    given |= {"attention_mask": torch.ones(1, seen, dtype=torch.long)} if "attention_mask" in accepted else {}
    given |= {"position_ids": positions} if "position_ids" in accepted else {}
    try:
        return model(**given)
    except Exception as e:  # the module's own code may fail in any way
        raise refused(f"self-test: transformers' module does not run: {type(e).__name__}: {one_line(e)}") from e


def _logits(model: nn.Module, ids: Tensor, positions: Tensor | None) -> Tensor:
    """transformers' logits [tokens, vocab]."""
    logits: Tensor = _run(model, ids, positions).logits
    return logits[0]


def check_counting(model: nn.Module, ids: Tensor) -> None:
    """Left to itself the model must count its tokens from 0, as the engine does."""
    told = _logits(model, ids, torch.arange(ids.shape[1])[None])
    if not _distance(_logits(model, ids, None), told) <= LOCAL_TOLERANCE:
        raise refused(
            "self-test: the model gives its tokens other positions than 0, 1, 2 ... when it is not told them, "
            "which a plan does not do"
        )


def check_default(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> None:
    """What was traced, transformers' eager attention, must give what its default attention does, where they differ."""
    if not model._supports_sdpa:
        return
    other = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="sdpa").eval()
    other.load_state_dict(model.state_dict())
    for name, module in model.named_modules():
        if "forward" in vars(module):  # a position module that answers for the longest sequence
            other.get_submodule(name).forward = module.forward
    error = _distance(_logits(other, ids, positions), _logits(model, ids, positions))
    if not error <= LOCAL_TOLERANCE:
        raise refused(
            f"self-test: the eager attention of {type(model).__name__} and the one that transformers takes by default "
            f"give logits {error:.1e} of the largest apart, so its code does not say what the model computes"
        )


def check_continues(model: nn.Module, ids: Tensor) -> None:
    """A model that numbers its tokens itself must go on counting where its cache ends, as a packed step has it."""
    positions = torch.arange(ids.shape[1])[None]
    whole = _logits(model, ids, positions)
    first = _run(model, ids[:, :_PREFIX], positions[:, :_PREFIX], use_cache=True)
    rest = _run(model, ids[:, _PREFIX:], positions[:, _PREFIX:], past_key_values=first.past_key_values, use_cache=True)
    if not _distance(rest.logits[0], whole[_PREFIX:]) <= LOCAL_TOLERANCE:
        raise refused(
            "self-test: the model numbers its tokens by where they lie in a step, and continued from its cache it "
            "gives other logits than at once"
        )


def check_logits(model: PreTrainedModel, graph: Graph, ids: Tensor, positions: Tensor) -> float:
    """Compares the interpreted graph with the module on some rows; returns the relative error."""
    rows = torch.tensor([ids.shape[1] - 1, 0, ids.shape[1] // 2, 3])
    state = model.state_dict()
    weights = interp.weights_of(graph, lambda name: state[name].numpy(), graph.constants)
    given = {"ids": ids[0], "positions": positions[0], "logit_rows": rows}
    inputs = {name: t.numpy().astype(np.int32) for name, t in given.items()}
    ours = torch.from_numpy(interp.run(graph, inputs, weights)["logits"])
    theirs = _logits(model, ids, positions)[rows]
    error = _distance(ours, theirs)
    if error <= TOLERANCE:
        return error
    noise = _distance(theirs, _logits(_doubled(model), ids, positions)[rows])
    if not noise <= _MOST_NOISE:
        raise _UnsteadyError(
            f"self-test: logits of the compiled graph differ from transformers' by {error:.1e} of the largest, and "
            f"transformers' own in float32 and float64 by {noise:.1e}, so no graph can be judged. {NEXT_STEP}"
        )
    if not error <= _NOISE * noise:
        raise refused(
            f"self-test: logits of the compiled graph differ from transformers' by {error:.1e} of the largest, "
            f"expected at most {max(TOLERANCE, _NOISE * noise):.1e}; the graph does not compute what the model does"
        )
    return error


def _doubled(model: PreTrainedModel) -> PreTrainedModel:
    """The model in float64, its position modules answering as the original's do."""
    other = copy.deepcopy(model).double()
    for (_, own), (_, its) in zip(model.named_modules(), other.named_modules(), strict=True):
        if "forward" in vars(own):
            its.forward = own.forward
    return other


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max() / b.abs().max())


def check_local(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> None:
    """With attention cut down to single tokens, permuting the tokens must permute the logits, no more."""
    order = torch.randperm(ids.shape[1])
    with hooks.installed(_one_token, _no_mask, name="planc-local") as name:
        model.set_attn_implementation(name)
        try:
            straight, permuted = _logits(model, ids, positions), _logits(model, ids[:, order], positions[:, order])
        finally:
            model.set_attn_implementation("eager")
    if not _distance(permuted, straight[order]) <= LOCAL_TOLERANCE:
        raise refused("self-test: tokens mix outside of attention, so sequences cannot share a step")


def _one_token(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **others: Any
) -> tuple[Tensor, None]:
    """A stand-in for attention where each token sees itself alone, yet q, k and v all matter."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    score = torch.tanh((query * key).sum(-1, keepdim=True))
    return (value * (1 + score)).transpose(1, 2).contiguous(), None


def _no_mask(*given: Any, **others: Any) -> None:
    return None
