"""How far stored weights are from the checkpoint's: in goes a planned graph, out come errors of those in a scheme."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from planc.compiler.ir.graph import Graph
from planc.compiler.ir.hadamard import back
from planc.compiler.ir.operands import rounding
from planc.compiler.ir.parts import part
from planc.compiler.ir.quant import BLOCK, SCHEMES, Scheme
from planc.compiler.ir.recipe import Reader, Recipe, RowReader, evaluate, infer
from planc.compiler.ir.shards import of_rank
from planc.plans.schema import WeightError

SAMPLE = 1 << 22  # elements of a weight that are looked at: enough for three digits, whatever its size
_KINDS = {"qlinear": "linear", "qlinear_act_mul": "linear", "qexpert_linear": "expert", "qembedding": "embedding"}

Constants = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Quantized:
    """A weight [.., N, K] that the build rounds to a scheme: the recipe of its floats, their bounds, the blocks in
    which they turn before (hadamard.py), and its features that are kept to two digits.
    """

    name: str
    kind: str
    scheme: Scheme
    wide: Recipe
    clip: Recipe | None
    hadamard: int = 1
    outliers: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(d) for d in infer(self.wide).shape)

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules of the parameters that it joins; `*` stands for the numbers of experts."""
        return tuple(dict.fromkeys(module_of(name) for name in self.wide.loads))

    def stored(self, wide: np.ndarray, clip: np.ndarray | None) -> np.ndarray:
        """float32 values of what the plan keeps of some of its floats."""
        parts = (self.scheme.part(wide, p, clip, self.hadamard, self.outliers) for p in self.scheme.parts)
        return back(self.scheme.folded(self.scheme.dequantize(*parts), self.outliers), self.hadamard)


def quantized(graph: Graph) -> list[Quantized]:
    """The weights that the graph rounds; those that a checkpoint holds in a scheme are taken as they are."""
    found = []
    for w in graph.weights:
        recipe = w.recipe.inputs[0] if w.recipe.op == "pack" else w.recipe
        if recipe.op != "quantize" or recipe.get("part") != "q":
            continue
        wide, clip, chosen = rounding(recipe.inputs, [infer(r) for r in recipe.inputs])
        outliers = None if chosen is None else graph.constants[str(chosen.get("digest"))]
        kinds = [_KINDS[n.op] for n in graph.users[w.name] if n.op in _KINDS]
        kind = next((k for k in kinds if k != "embedding"), "embedding")
        turned = int(dict(recipe.attrs).get("hadamard", 1))  # type: ignore[arg-type]
        row = SCHEMES[str(recipe.get("scheme"))]
        found.append(Quantized(w.name, kind, row, wide, clip, turned, outliers))
    return found


def module_of(tensor: str) -> str:
    """The module of a parameter's name; numbers after the layer's are those of experts."""
    words = tensor.removesuffix(".weight").split(".")
    numbers = [i for i, word in enumerate(words) if word.isdigit()]
    return ".".join("*" if i in numbers[1:] else word for i, word in enumerate(words))


def errors(graph: Graph, read: Reader, rows: RowReader | None = None, ranks: int = 1) -> tuple[WeightError, ...]:
    """The relative error of each weight in a scheme, the parts of all ranks together, over evenly spread parts of the
    large ones.

    Memory: one weight, of a stack of experts one expert, and a few times SAMPLE float32.
    """
    found = []
    for weight in quantized(graph):
        lost = kept = 0.0
        parts = [replace(weight, wide=of_rank(weight.wide, r)) for r in range(ranks)]
        for wide, clip in (sample for p in parts for sample in samples(p, read, graph.constants, rows)):
            floats = wide.astype(np.float32)
            lost += float(np.square(weight.stored(floats, clip) - floats, dtype=np.float64).sum())
            kept += float(np.square(floats, dtype=np.float64).sum())
        error = float(f"{np.sqrt(lost / kept):.3g}") if kept else 0.0
        found.append(WeightError(weight.modules, weight.kind, weight.scheme.name, error))
    return tuple(found)


def samples(
    weight: Quantized, read: Reader, constants: Constants, rows: RowReader | None
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Parts [n, K] of a weight and their bounds: rows in blocks that share no scale with others, or whole experts."""
    *stack, n, k = weight.shape
    if stack:
        chosen = _spread(stack[0], max(1, SAMPLE // prod((*stack[1:], n, k))))
        yield from ((wide, clip) for _, wide, clip in matrices(weight, read, constants, rows, chosen))
        return
    ((_, wide, clip),) = matrices(weight, read, constants, rows)
    for b in _spread(-(-n // BLOCK), max(1, SAMPLE // (BLOCK * k))):
        at = slice(b * BLOCK, (b + 1) * BLOCK)
        yield wide[at], None if clip is None else clip[..., at]


def matrices(
    weight: Quantized, read: Reader, constants: Constants, rows: RowReader | None, chosen: Iterable[int] | None = None
) -> Iterator[tuple[slice, np.ndarray, np.ndarray | None]]:
    """The weight, or each expert of a stack (those that are chosen): its place, floats and bounds, one in memory."""
    clip = None if weight.clip is None else evaluate(weight.clip, read, constants, rows)
    if len(weight.shape) == 2:
        yield slice(None), evaluate(weight.wide, read, constants, rows), clip
        return
    for e in range(weight.shape[0]) if chosen is None else chosen:
        at = slice(e, e + 1)
        yield at, evaluate(part(weight.wide, 0, e, e + 1), read, constants, rows), None if clip is None else clip[at]


def _spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` indices, the first and the last among them."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, most)).tolist()})
