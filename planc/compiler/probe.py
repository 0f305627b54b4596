"""What quantizing single weights costs: in goes a plan that is wide throughout, out comes the KL that each would add.

The wide plan runs with the rounded values of one group of weights in the place of its own, so that a group costs one
pass over some tokens and no build. Rounded activations have no part in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from planc.compiler.ir.graph import Graph, Weight
from planc.compiler.ir.packing import pack
from planc.compiler.ir.recipe import Reader, Recipe, RowReader
from planc.compiler.ir.types import DTYPES, PACKED
from planc.compiler.weight_errors import Constants, Quantized, matrices
from planc.compiler.weights import stored_shape
from planc.plans.schema import Plan
from planc.runtime.cpu import CpuExecutor
from planc.runtime.goldens import Scorer

TOKENS = 128
GROUPS = 64  # at most; equal weights of neighbouring layers go together in deep models
_LOGITS = 96 << 20  # bytes of the wide plan's logits
_ALIGN = 64


@dataclass(frozen=True)
class Group:
    """Weights that get the same scheme: `kl` is what rounding them alone costs, in nats."""

    weights: tuple[Quantized, ...]
    kl: float

    @property
    def size(self) -> int:
        """Elements."""
        return sum(w.size for w in self.weights)

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(m for w in self.weights for m in w.modules)


def groups(weights: Sequence[Quantized]) -> list[tuple[Quantized, ...]]:
    """The weights in at most GROUPS groups: one each, or neighbouring layers' equal ones together."""
    width = -(-len(weights) // GROUPS)
    alike: dict[tuple[str, ...], list[Quantized]] = {}
    for w in weights:
        alike.setdefault(tuple(_without_layer(m) for m in w.modules), []).append(w)
    return [tuple(row[i : i + width]) for row in alike.values() for i in range(0, len(row), width)]


def _without_layer(module: str) -> str:
    return ".".join("*" if word.isdigit() else word for word in module.split("."))


class Probe:
    """Runs a wide plan on some tokens with single weights replaced."""

    def __init__(
        self, root: Path, plan: Plan, graph: Graph, constants: Constants, read: Reader, rows: RowReader | None
    ) -> None:
        """`root` holds the plan of `graph`, whose weights are all in a dtype of floats; `constants` are those of the
        weights that will be measured.
        """
        blocks = -(-TOKENS // plan.kv.block_size)
        self._executor = CpuExecutor(root, plan, num_blocks=blocks)
        self._scorer = Scorer(self._executor, plan.limits.max_num_seqs, plan.limits.max_num_batched_tokens)
        self._most = max(2, min(TOKENS, plan.limits.max_model_len, _LOGITS // (4 * plan.limits.vocab_size)))
        self._constants, self._read, self._rows = constants, read, rows
        self._wide = {_floats(w.recipe): w for w in graph.weights if w.recipe.loads}

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *error: object) -> None:
        self._executor.close()

    def measure(
        self, weights: Sequence[Quantized], text: Sequence[int], progress: Callable[[int], None]
    ) -> list[Group]:
        """The groups of the weights with their cost; `progress` counts groups. A weight that the wide plan joins in
        another way is in none.
        """
        ids = list(text[: self._most])
        truth = _log_softmax(self._scorer.logits(ids, 0))
        found = []
        for group in groups(weights):
            arrays = dict(self._rounded(w) for w in group if _floats(w.wide) in self._wide)
            if len(arrays) == len(group):
                self._executor.replace_weights(arrays)
                found.append(Group(group, max(0.0, _kl(truth, self._scorer.logits(ids, 0)))))
            progress(1)
        self._executor.replace_weights({})
        return found

    def _rounded(self, weight: Quantized) -> tuple[str, np.ndarray]:
        """The name that the weight has in the wide plan, and its rounded values as that plan stores them."""
        target = self._wide[_floats(weight.wide)]
        out = _aligned(stored_shape(target.value.type), DTYPES[target.value.type.dtype])
        for at, wide, clip in matrices(weight, self._read, self._constants, self._rows):
            values = weight.stored(wide.astype(np.float32), clip).astype(out.dtype)
            out[at] = _laid_out(values, target)
        return target.name, out


def _floats(recipe: Recipe) -> Recipe:
    """The recipe without its dtypes and layout: what it takes from the checkpoint."""
    if recipe.op in ("cast", "pack"):
        return _floats(recipe.inputs[0])
    return replace(recipe, inputs=tuple(_floats(r) for r in recipe.inputs))


def _laid_out(values: np.ndarray, weight: Weight) -> np.ndarray:
    layout = weight.value.type.layout
    return pack(values, layout) if layout in PACKED else values


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGN, np.uint8)
    start = -raw.ctypes.data % _ALIGN
    return raw[start : start + size].view(dtype).reshape(shape)


def _log_softmax(rows: np.ndarray) -> np.ndarray:
    shifted = rows - rows.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)), np.float32)


def _kl(truth: np.ndarray, rows: np.ndarray) -> float:
    """Mean KL(truth || rows); float32 terms, which is exact enough to rank by."""
    terms = np.exp(truth) * (truth - _log_softmax(rows))
    return float(terms.sum(axis=-1, dtype=np.float64).mean())
