"""What each rank holds of a tensor: in goes a recipe that speaks of all ranks, out comes that of one of them.

    shard(recipe, axis, counts, ranges)

One graph is that of every rank: shapes and kernels are the same, and what differs is which part of a tensor a weight
takes. A `shard` step names the parts of all ranks: `ranges` holds (start, stop) pairs along `axis`, rank by rank, and
`counts` how many of them each rank has. Parts may overlap, where ranks hold the same heads.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from planc.compiler.ir.graph import Graph
from planc.compiler.ir.parts import part
from planc.compiler.ir.recipe import Recipe, infer, step
from planc.compiler.ir.types import Attr, TensorType

Ranges = tuple[tuple[tuple[int, int], ...], ...]  # of each rank, the parts of an axis in order


def shard(recipe: Recipe, axis: int, ranges: Ranges) -> Recipe:
    """The recipe of each rank's parts of an axis."""
    flat = tuple(bound for mine in ranges for pair in mine for bound in pair)
    return step("shard", recipe, axis=axis, counts=tuple(map(len, ranges)), ranges=flat)


def ranges_of(attrs: Mapping[str, Attr]) -> Ranges:
    """The parts that the attributes of a `shard` step name."""
    counts, flat = attrs["counts"], attrs["ranges"]
    assert isinstance(counts, tuple)
    assert isinstance(flat, tuple)
    if len(flat) != 2 * sum(counts):
        raise ValueError(f"shard: {sum(counts)} parts need {2 * sum(counts)} bounds, got {len(flat)}")
    pairs, out = iter(zip(flat[::2], flat[1::2], strict=True)), []
    for count in counts:
        out.append(tuple(next(pairs) for _ in range(count)))
    return tuple(out)


def part_type(attrs: Mapping[str, Attr], whole: TensorType) -> TensorType:
    """Type of each rank's part; ValueError when the parts are not of one size, or do not lie in the axis."""
    axis, ranges = int(attrs["axis"]), ranges_of(attrs)  # type: ignore[arg-type]
    size = int(whole.shape[axis])
    sizes = {sum(stop - start for start, stop in mine) for mine in ranges}
    if len(sizes) != 1 or any(not 0 <= start < stop <= size for mine in ranges for start, stop in mine):
        raise ValueError(f"shard: parts {ranges} of axis {axis} of {whole}")
    return TensorType(whole.dtype, (*whole.shape[:axis], sizes.pop(), *whole.shape[axis + 1 :]))


def ranks_of(recipe: Recipe) -> int:
    """How many ranks the recipe differs by; 1 when it is that of all."""
    return max((len(r.get("counts")) for r in recipe.steps() if r.op == "shard"), default=1)  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def of_rank(recipe: Recipe, rank: int) -> Recipe:
    """The recipe of one rank, its parts taken as deep as they go, so that no more is read than the rank needs."""
    inputs = tuple(of_rank(r, rank) for r in recipe.inputs)
    if recipe.op != "shard":
        return recipe if inputs == recipe.inputs else replace(recipe, inputs=inputs)
    axis = int(recipe.get("axis"))  # type: ignore[arg-type]
    parts = [part(inputs[0], axis, start, stop) for start, stop in ranges_of(dict(recipe.attrs))[rank]]
    return parts[0] if len(parts) == 1 else step("concat", *parts, axis=axis)


def graph_of_rank(graph: Graph, rank: int) -> Graph:
    """The graph with the weights of one rank."""
    weights = tuple(replace(w, recipe=of_rank(w.recipe, rank)) for w in graph.weights)
    for w in weights:
        assert infer(w.recipe) == w.value.type, w.name
    return replace(graph, weights=weights)
