"""One type's row: in goes a model type, out comes whether its plan computes what transformers does, or the refusal.

The plan is built as a user builds it, from a checkpoint on disk, and runs in the engine: a prompt longer than every
window and chunk of the config, prefilled in pieces of several sizes, then decoded.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from planc.compiler.coverage import run
from planc.compiler.coverage.small import VOCAB, small
from planc.compiler.coverage.tokenizer import small_tokenizer
from planc.compiler.coverage.types import ModelType
from planc.compiler.coverage.weights import doubled, logits, relative_error, steady_model
from planc.compiler.refusal import NEXT_STEP
from planc.compiler.source.base import one_line
from planc.errors import PlancError

PROMPT = 200  # tokens, beyond every window and chunk of a small config
DECODE = 16
CHUNKS = (7, 32, 256)  # tokens of a prefill step; the last takes the prompt at once
ROWS = 32  # of logits in a step
TOLERANCE = 1e-4  # of the largest logit
TIE = 1e-5
AHEAD = 3  # other last tokens
CHAOS = 1e-2  # where a jitter of the weights moves the logits so far, no two programs agree

DEFECTS = ("the C++ compiler failed",)  # errors that no model is to blame for

OK, REFUSED, WRONG, CRASHED, BROKEN, EXCLUDED = "ok", "refused", "WRONG", "CRASHED", "cannot run", "not a decoder"
FAILURES = (WRONG, CRASHED)


@dataclass(frozen=True)
class Row:
    """A type's verdict. `tokens` is equal, tie or differ; `detail` the refusal's first line, or what went wrong."""

    name: str
    verdict: str
    detail: str = ""
    kinds: str = ""
    error: float | None = None
    tokens: str = ""
    seconds: float = 0.0


def check(kind: ModelType, **fields: Any) -> Row:
    """The row of a type; `fields` go over those of its small config."""
    start = time.perf_counter()
    row = _row(kind, fields)
    return replace(row, seconds=round(time.perf_counter() - start, 1))


def _row(kind: ModelType, fields: dict[str, Any]) -> Row:
    if kind.excluded:
        return Row(kind.name, EXCLUDED, kind.excluded)
    if kind.broken:
        return Row(kind.name, BROKEN, kind.broken)
    try:
        config = small(kind.name, **fields)
        prompt = _prompt(config)
        model, moved = steady_model(config, prompt)
        if _sees_ahead(model, prompt):
            return Row(kind.name, EXCLUDED, "its attention is not causal")
    except Exception as e:  # noqa: BLE001 - transformers' code of any model
        return Row(kind.name, BROKEN, f"transformers does not run it: {type(e).__name__}: {one_line(e)}")
    kinds = kinds_of(config)
    if not moved < CHAOS:
        return Row(kind.name, BROKEN, f"no weights give steady logits: rounding alone moves them by {moved:.0e}", kinds)
    with tempfile.TemporaryDirectory(prefix="planc-coverage-") as folder:
        return replace(_compared(kind.name, model, prompt, Path(folder)), kinds=kinds)


def _prompt(config: PretrainedConfig) -> Tensor:
    vocab = int(getattr(config.get_text_config(), "vocab_size", VOCAB))
    return torch.randint(4, vocab, (PROMPT,), generator=torch.Generator().manual_seed(0))


def _sees_ahead(model: PreTrainedModel, prompt: Tensor) -> bool:
    """Whether another last token changes the logits before it, whichever it is."""
    other = prompt.repeat(AHEAD, 1)
    other[:, -1] = torch.tensor([t for t in range(4, 5 + AHEAD) if t != prompt[-1]][:AHEAD])
    model = doubled(model, prompt)
    before = logits(model, prompt)[:-1]
    error = min(relative_error(logits(model, ids)[:-1], before) for ids in other)
    if error != error:
        raise PlancError("its logits are not finite")
    return error > TOLERANCE


def _compared(name: str, model: PreTrainedModel, prompt: Tensor, folder: Path) -> Row:
    model.save_pretrained(folder / "model")
    small_tokenizer().save_pretrained(folder / "model")
    plan = folder / "plan"
    try:
        _build(folder / "model", plan)
    except PlancError as e:
        line = _first_line(e, folder)
        return Row(name, CRASHED if line.startswith(DEFECTS) else REFUSED, line)
    ids = prompt.tolist()
    rows = torch.from_numpy(run.every_row(plan, ids, chunk=ROWS))
    errors = [relative_error(rows, logits(model, prompt))]
    outcomes = []
    for chunk in CHUNKS:
        made = run.generate(plan, ids, chunk=chunk, count=DECODE)
        want = logits(model, torch.cat([prompt, torch.tensor(made.tokens)]))[len(ids) - 1 : -1]
        errors.append(relative_error(torch.from_numpy(made.logits), want))
        outcomes.append(_tokens(made.tokens, want))
    return _judged(name, errors, outcomes)


def _first_line(error: PlancError, folder: Path) -> str:
    """The refusal without the advice that every one ends with, and without this run's own path."""
    line = str(error).splitlines()[0].replace(f"{folder}/", "")
    return line.removesuffix(NEXT_STEP).strip()


def _build(model: Path, plan: Path) -> None:
    from planc.compiler.build import BuildRequest, build
    from planc.compiler.progress import Progress

    request = BuildRequest(
        str(model),
        plan,
        dtype="f32",
        max_model_len=PROMPT + DECODE,  # the whole of what transformers sees, for what depends on the length
        max_num_seqs=ROWS,
        max_num_batched_tokens=max(CHUNKS),
        reference="none",
    )
    with Progress(quiet=True) as progress:
        build(request, progress)


def _tokens(tokens: list[int], want: Tensor) -> str:
    """ "equal", "tie" where a token that differs is as good to the model, or "differ"."""
    outcome = "equal"
    for token, row in zip(tokens, want, strict=True):
        if token != int(row.argmax()):
            if not row.max() - row[token] <= TIE * row.abs().max():
                return "differ"
            outcome = "tie"
    return outcome


def _judged(name: str, errors: list[float], outcomes: list[str]) -> Row:
    error = float(torch.tensor(errors).max())  # NaN where any is
    tokens = next((o for o in ("differ", "tie") if o in outcomes), "equal")
    if error <= TOLERANCE and tokens != "differ":
        return Row(name, OK, error=error, tokens=tokens)
    steps = ", ".join(f"{e:.0e}" for e in errors)
    where = f"errors of every row, then of chunks {', '.join(map(str, CHUNKS))}: {steps}"
    return Row(name, WRONG, where, error=error, tokens=tokens)


def kinds_of(config: PretrainedConfig) -> str:
    """What sorts of layers and attention the config has, in a few words."""
    return ", ".join(dict.fromkeys(_kinds(config.get_text_config())))


def _kinds(config: PretrainedConfig) -> Iterator[str]:
    if layers := _first(config, "layer_types", "layers_block_type"):
        yield from (str(kind).removesuffix("_attention") for kind in layers)
    else:
        yield "sliding" if _first(config, "sliding_window", "window_size") else "full"
    if _first(config, "kv_lora_rank"):
        yield "latent"
    if _first(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        yield "experts"
    yield from (kind for kind in _rope_types(_first(config, "rope_parameters") or {}) if kind != "default")


def _rope_types(parameters: dict[str, Any]) -> Iterator[str]:
    for name, value in parameters.items():
        if isinstance(value, dict):
            yield from _rope_types(value)
        elif name == "rope_type":
            yield value


def _first(config: PretrainedConfig, *names: str) -> Any:
    """The first of the fields that says something."""
    return next((value for name in names if (value := getattr(config, name, None))), None)
