"""The independent judge: transformers' own modules score token sequences, one module's weights in memory at a time.

In go a model source and sequences of token ids; out come the logits of every position, chunk by chunk. The model is
built on the meta device; a hook loads a module's parameters just before its forward and drops them after it; of a stack
of experts, one is loaded when the module takes it. So a model larger than RAM can be judged, and nothing of planc's
graph, passes or kernels takes part.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from planc.compiler import regime
from planc.compiler.ir.recipe import Recipe, evaluate, infer
from planc.compiler.lazy import LazyTensor
from planc.compiler.source.base import DTYPES, ModelSource, new_model, one_line
from planc.compiler.source.bind import bind
from planc.compiler.source.buffers import real_buffers, to_torch
from planc.errors import PlancError
from planc.plans.host import usable_cpus

if TYPE_CHECKING:
    from torch import nn


def reference_logits(
    source: ModelSource,
    sequences: list[list[int]],
    rows_per_chunk: int = 64,
    dtype: torch.dtype = torch.float32,
    num_threads: int | None = None,
    limit: int | None = None,
) -> Iterator[tuple[int, int, np.ndarray[Any, np.dtype[np.float32]]]]:
    """Yields (sequence index, first position, logits f32[n, vocab]) for all positions of all sequences in order, n <=
    rows_per_chunk.

    One teacher-forced pass over the sequences as one right-padded batch, attention in transformers' eager form. `dtype`
    is that of parameters and arithmetic. Memory: the largest module's parameters, the activations of the batch
    (attention scores take batch x heads x length^2), and rows_per_chunk x vocab logits. `num_threads` None takes the
    CPUs that the process may use. What depends on a sequence's length is fixed as for `limit` tokens, as a plan has it.
    PlancError for empty input, ids outside the vocabulary, or a module that fails.
    """
    yield from Judge(source, rows_per_chunk, dtype, num_threads, limit).logits(sequences)


class Judge:
    """`reference_logits` of several plans in a row: the hidden states of a sequence are worked out once and kept."""

    def __init__(
        self,
        source: ModelSource,
        rows_per_chunk: int = 64,
        dtype: torch.dtype = torch.float32,
        num_threads: int | None = None,
        limit: int | None = None,
    ) -> None:
        self._model = StreamedModel(source, dtype)
        self._rows, self._num_threads, self._limit = rows_per_chunk, num_threads, limit
        self._hidden: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, sequences: list[list[int]]) -> Iterator[tuple[int, int, np.ndarray[Any, np.dtype[np.float32]]]]:
        """(sequence index, first position, logits f32[n, vocab]) as `reference_logits` has them."""
        _check(sequences, self._model.vocab_size)
        self._run([s for s in sequences if tuple(s) not in self._hidden])
        with self._model.head_loaded():
            for index, sequence in enumerate(sequences):
                hidden = self._hidden[tuple(sequence)]
                for start in range(0, len(sequence), self._rows):
                    with _threads(self._num_threads):
                        logits = self._model.logits(hidden[start : start + self._rows])
                    yield index, start, logits.float().numpy()

    def _run(self, sequences: list[list[int]]) -> None:
        if sequences:
            with _threads(self._num_threads):
                hidden = self._model.hidden(_padded(sequences), self._limit)
            self._hidden |= {tuple(s): rows[: len(s)].clone() for s, rows in zip(sequences, hidden, strict=True)}


class StreamedModel:
    """A transformers causal language model on meta whose modules hold real parameters only while they run.

    live_bytes and peak_bytes count the parameter bytes loaded now, and at most.
    """

    def __init__(self, source: ModelSource, dtype: torch.dtype = torch.float32) -> None:
        name = str(dtype).removeprefix("torch.")
        self._model: Any = new_model(source.config(), trust_remote_code=source.trust_remote_code, dtype=name)
        self._model.set_experts_implementation("eager")  # one expert at a time, so that one is in memory at a time
        self._source, self._dtype = source, dtype
        self._binding = bind(self._model, source)
        self._set_buffers(real_buffers(self._model, source, self._binding))
        self._loaded: dict[nn.Module, dict[str, Any]] = {}
        self._keep = False
        self.live_bytes = self.peak_bytes = 0
        self._hook()

    @property
    def vocab_size(self) -> int:
        return int(self._model.get_input_embeddings().num_embeddings)

    def hidden(self, ids: torch.Tensor, limit: int | None = None) -> torch.Tensor:
        """The base model's last hidden state [batch, length, hidden] for ids i64[batch, length]."""
        # Padding is on the right, where causal attention does not look, so the mask is all ones. Positions are the
        # model's own, which need not start at 0.
        mask = {"attention_mask": torch.ones_like(ids)}
        accepted = inspect.signature(self._base().forward).parameters
        fixed = regime.fixed(self._model, limit) if limit else nullcontext()
        with torch.no_grad(), self._stage("hidden states"), fixed:
            out = self._base()(input_ids=ids, use_cache=False, **(mask if "attention_mask" in accepted else {}))
        self._output = type(out)
        return out.last_hidden_state

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """logits [n, vocab] of hidden states [n, hidden] that `hidden` returned, by the model's own forward without its
        base model.

        So soft caps, logit scales and biases of the head are the model's.
        """
        output = self._output(last_hidden_state=rows[None])
        with torch.no_grad(), self._stage("logits"), self._answering(output) as asked:
            out = self._model(input_ids=torch.zeros(1, len(rows), dtype=torch.long), use_cache=False)
        if not asked:
            raise PlancError(
                f"reference: {type(self._model).__name__} does not ask its base model for hidden states, so its head "
                "cannot be run alone. Pass --reference none."
            )
        return out.logits[0]

    @contextmanager
    def _answering(self, output: Any) -> Iterator[list[bool]]:
        """While this is open, the base model and each model in it that a head may ask instead (a decoder) answer with
        `output`; the list is empty until one was asked.
        """
        from transformers import PreTrainedModel

        asked: list[bool] = []
        models = [module for module in self._base().modules() if isinstance(module, PreTrainedModel)]

        def answer(*args: Any, **kwargs: Any) -> Any:
            asked.append(True)
            return output

        for module in models:
            module.forward = answer  # type: ignore[method-assign]
        try:
            yield asked
        finally:
            for module in models:
                del module.forward

    @contextmanager
    def head_loaded(self) -> Iterator[None]:
        """While this is open, what a forward loads stays loaded: the head is read once for all chunks."""
        self._keep = True
        try:
            yield
        finally:
            self._keep = False
            for module in list(self._loaded):
                self._drop(module)

    def _base(self) -> Any:
        base = getattr(self._model, self._model.base_model_prefix, None) or getattr(self._model, "model", None)
        if base is None or base is self._model:
            raise PlancError(f"{type(self._model).__name__} has no separate base model; pass --reference none.")
        return base

    def _set_buffers(self, buffers: dict[str, torch.Tensor]) -> None:
        for fqn, value in buffers.items():
            path, _, name = fqn.rpartition(".")
            self._model.get_submodule(path)._buffers[name] = value

    def _hook(self) -> None:
        """Every parameter is read where code uses it. Those of a module that runs are read at once and once: but no
        stacks, of which its code may take one matrix after another.
        """
        for path, module in self._model.named_modules():
            lazy = {name: self._lazy(f"{path}.{name}" if path else name) for name in _own(module)}
            if lazy:
                module._parameters.update(lazy)
                module.register_forward_pre_hook(lambda module, _: self._load(module))
                module.register_forward_hook(lambda module, *_: None if self._keep else self._drop(module))

    def _lazy(self, fqn: str) -> LazyTensor:
        return LazyTensor.of(self._binding.recipe(fqn), self._dtype, self._passing)

    def _passing(self, recipe: Recipe) -> torch.Tensor:
        """Values that live as long as the code that asked for them holds them."""
        value = self._read(recipe)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + value.nbytes)
        return value

    def _load(self, module: nn.Module) -> None:
        if module in self._loaded:
            return
        flat = {
            name: lazy for name in _own(module) if (lazy := module._parameters[name]) is not None and lazy.dim() < 3
        }
        self._loaded[module] = flat
        for name, lazy in flat.items():
            value = self._read(lazy.recipe)
            module._parameters[name] = torch.nn.Parameter(value, requires_grad=False)
            self.live_bytes += value.nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _read(self, recipe: Recipe) -> torch.Tensor:
        """A tensor in the model's dtype; one stored in another is converted in pieces, never held whole in both."""
        made = infer(recipe)
        plain = recipe.op == "load" and to_torch(np.empty(0, DTYPES[made.dtype])).dtype != self._dtype
        if not plain:
            array = evaluate(recipe, self._source.read, {}, self._source.read_rows)
            return to_torch(np.require(array, requirements=["C", "W"])).to(self._dtype)
        value, at = torch.empty([int(d) for d in made.shape], dtype=self._dtype), 0
        flat = value.view(-1)
        for piece in self._source.read_pieces(str(recipe.get("name"))):
            flat[at : at + piece.size] = to_torch(piece)
            at += piece.size
        return value

    @contextmanager
    def _stage(self, what: str) -> Iterator[None]:
        """Names the stage and the model in whatever its code raises."""
        try:
            yield
        except PlancError:
            raise
        except Exception as e:  # the module's own code may fail in any way
            raise PlancError(
                f"reference: {type(self._model).__name__} failed while it computed {what}: "
                f"{type(e).__name__}: {one_line(e)} Pass --reference none to build without it."
            ) from e

    def _drop(self, module: nn.Module) -> None:
        for name, lazy in self._loaded.pop(module, {}).items():
            self.live_bytes -= module._parameters[name].nbytes  # type: ignore[union-attr]
            module._parameters[name] = lazy


def _own(module: nn.Module) -> list[str]:
    return [name for name, parameter in module._parameters.items() if parameter is not None]


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """torch's thread count (None: the CPUs that the process may use), put back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or usable_cpus())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _padded(sequences: list[list[int]]) -> torch.Tensor:
    """i64[count, longest], zeros on the right."""
    width = max(map(len, sequences))
    return torch.tensor([sequence + [0] * (width - len(sequence)) for sequence in sequences], dtype=torch.long)


def _check(sequences: list[list[int]], vocab: int) -> None:
    if not sequences or not all(sequences):
        raise PlancError("the reference needs at least one sequence, and each of at least one token.")
    for index, sequence in enumerate(sequences):
        wrong = [token for token in sequence if not 0 <= token < vocab]
        if wrong:
            raise PlancError(f"sequence {index} holds token {wrong[0]}; the vocabulary has ids 0 to {vocab - 1}.")
