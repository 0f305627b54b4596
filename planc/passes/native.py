"""Weights that a checkpoint holds in a scheme: in goes the recipe of the floats, out come those of the very codes."""

from collections.abc import Mapping
from dataclasses import replace

from planc.compiler.ir.quant import Scheme
from planc.compiler.ir.recipe import Recipe, infer, load, step
from planc.compiler.ir.shards import ranges_of, shard
from planc.compiler.ir.types import TensorType
from planc.errors import PlancError


def native_part(recipe: Recipe, part: str, row: Scheme, native: Mapping[str, str]) -> Recipe | None:
    """The recipe of a part of a weight, made by the same moves of the parts in the checkpoint.

    None where a tensor is not held in the scheme, or a move would take groups apart. PlancError where the parts of
    ranks would: the codes of a checkpoint are never rounded again for that.
    """
    if recipe.op == "cast":
        return native_part(recipe.inputs[0], part, row, native)
    if recipe.op == "load":
        return _loaded(recipe, part, row, native)
    if recipe.op == "transpose":
        inner = _transposed_back(recipe)
        return None if inner is None else native_part(inner, part, row, native)
    if recipe.op == "shard":
        return _sharded(recipe, part, row, native)
    if recipe.op not in ("concat", "slice", "reshape"):
        return None
    inputs = [native_part(r, part, row, native) for r in recipe.inputs]
    if any(r is None for r in inputs):
        return None
    made = tuple(r for r in inputs if r is not None)
    if recipe.op == "reshape":
        return _reshaped(recipe, made[0], part, row)
    axis = row.axis(part, int(recipe.get("axis")), len(infer(recipe).shape))  # type: ignore[arg-type]
    if axis is None:
        return None
    attrs = tuple((k, axis if k == "axis" else v) for k, v in recipe.attrs)
    return replace(recipe, inputs=made, attrs=attrs)


def _sharded(recipe: Recipe, part: str, row: Scheme, native: Mapping[str, str]) -> Recipe | None:
    """The parts of ranks: along K, of scales and zero points those of whole groups."""
    (inner,) = recipe.inputs
    made = native_part(inner, part, row, native)
    if made is None:
        return None
    axis, ranges, ndim = int(recipe.get("axis")), ranges_of(dict(recipe.attrs)), len(infer(recipe).shape)  # type: ignore[arg-type]
    if (own := row.axis(part, axis, ndim)) is not None:
        return shard(made, own, ranges)
    if row.group is None:  # a scale a channel: that of all of its inputs
        return made
    if any(bound % row.group for mine in ranges for pair in mine for bound in pair):
        size = int(infer(inner).shape[axis])
        fits = [n for n in range(1, len(ranges)) if size // row.group % n == 0 and size % row.group == 0]
        raise PlancError(
            f"{recipe.loads[0]} is held as {row.name}, in groups of {row.group} of its {size} inputs, which "
            f"{len(ranges)} ranks would take apart; --tp {fits[-1] if fits else 1} keeps them whole, and --dtype bf16 "
            "widens them."
        )
    return shard(made, ndim - 2, tuple(tuple((s // row.group, e // row.group) for s, e in mine) for mine in ranges))


def _loaded(recipe: Recipe, part: str, row: Scheme, native: Mapping[str, str]) -> Recipe | None:
    name = str(recipe.get("name"))
    if native.get(name) != row.name:
        return None
    t = row.part_type(TensorType("f32", infer(recipe).shape), part, held=True)
    return load(f"{name}:{part}", t.dtype, tuple(int(d) for d in t.shape))


def _transposed_back(recipe: Recipe) -> Recipe | None:
    """What is transposed twice, and so not at all: a parameter may be the transpose of what the checkpoint holds."""
    (inner,) = recipe.inputs
    while inner.op == "cast":
        (inner,) = inner.inputs
    if inner.op != "transpose":
        return None
    first, second = (r.get("perm") for r in (inner, recipe))
    assert isinstance(first, tuple)
    assert isinstance(second, tuple)
    return inner.inputs[0] if [first[i] for i in second] == sorted(first) else None


def _reshaped(recipe: Recipe, made: Recipe, part: str, row: Scheme) -> Recipe | None:
    """A reshape that only puts matrices on a stack, or takes them from it."""
    before, after = infer(recipe.inputs[0]).shape, infer(recipe).shape
    if before[-2:] != after[-2:] or len(after) < 2:
        return None
    t = row.part_type(TensorType("f32", after), part, held=True)
    return step("reshape", made, shape=tuple(int(d) for d in t.shape))
