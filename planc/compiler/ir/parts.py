"""Parts of a recipe: in goes a recipe and a range of an axis, out comes one that reads no more than the range needs."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

import numpy as np

from planc.compiler.ir.recipe import Reader, Recipe, RowReader, evaluate, infer, step

_PIECE = 64 << 20  # bytes of a stack's matrices made at a time


def part(recipe: Recipe, axis: int, start: int, stop: int) -> Recipe:
    """`start:stop` of `axis` (of a packed weight: an axis that stacks its matrices), taken as deep as it goes."""
    if (start, stop) == (0, _shape(recipe)[axis]):
        return recipe
    inputs = recipe.inputs
    if recipe.op == "concat":
        return _of_concat(recipe, axis, start, stop)
    if recipe.op == "transpose":
        perm: tuple[int, ...] = recipe.get("perm")  # type: ignore[assignment]
        return replace(recipe, inputs=(part(inputs[0], perm[axis], start, stop),))
    if recipe.op == "slice":
        return _of_slice(recipe, axis, start, stop)
    if recipe.op == "reshape" and (inner := _kept(_shape(inputs[0]), _shape(recipe), axis)) is not None:
        shape = (*_shape(recipe)[:axis], stop - start, *_shape(recipe)[axis + 1 :])
        return step("reshape", part(inputs[0], inner, start, stop), shape=shape)
    if recipe.op == "reshape" and axis == 0 and _shape(inputs[0])[0] % _shape(recipe)[0] == 0:
        rows = _shape(inputs[0])[0] // _shape(recipe)[0]
        return step("reshape", part(inputs[0], 0, start * rows, stop * rows), shape=(stop - start, *_shape(recipe)[1:]))
    if recipe.op == "cast" or (recipe.op in ("quantize", "pack") and axis < len(_shape(inputs[0])) - 2):
        shared = {r for r in inputs if infer(r).dtype == "i32"}  # outliers are those of all matrices
        return replace(recipe, inputs=tuple(r if r in shared else part(r, axis, start, stop) for r in inputs))
    return step("slice", recipe, axis=axis, start=start, stop=stop)


def pieces(
    recipe: Recipe, read: Reader, constants: Mapping[str, np.ndarray], rows: RowReader | None
) -> Iterator[np.ndarray]:
    """What `evaluate` makes, in order along the first axis; a stack of matrices comes some at a time.

    Without `rows` only if no tensor would be read more than once.
    """
    made = infer(recipe)
    count = int(made.shape[0]) if len(made.shape) > 2 else 1
    pace = max(1, _PIECE * count // max(made.nbytes(), 1))
    if pace >= count or not _splits(part(recipe, 0, 0, pace), part(recipe, 0, pace, count), rows is not None):
        yield evaluate(recipe, read, constants, rows)
        return
    for at in range(0, count, pace):
        yield evaluate(part(recipe, 0, at, min(at + pace, count)), read, constants, rows)


def _splits(taken: Recipe, rest: Recipe, ranges: bool) -> bool:
    """Whether a part goes down to tensors that the rest has no use for, or to ranges if those can be read: else the
    whole is better made once.
    """
    shared = set(taken.loads).intersection(rest.loads)
    cuts = [r for r in taken.steps() if r.op == "slice" and r.inputs[0].op != "slice"]
    return all(_reads_once(r.inputs[0], ranges and r.get("axis") == 0, shared) for r in cuts)


def _reads_once(cut: Recipe, in_range: bool, shared: set[str]) -> bool:
    return cut.op == "load" and (in_range or str(cut.get("name")) not in shared)


def _shape(recipe: Recipe) -> tuple[int, ...]:
    return tuple(int(d) for d in infer(recipe).shape)


def _of_concat(recipe: Recipe, axis: int, start: int, stop: int) -> Recipe:
    joined, at = recipe.get("axis"), 0
    if axis != joined:
        return replace(recipe, inputs=tuple(part(r, axis, start, stop) for r in recipe.inputs))
    kept = []
    for r in recipe.inputs:
        size = _shape(r)[axis]
        first, last = max(start - at, 0), min(stop - at, size)
        if first < last:
            kept.append(part(r, axis, first, last))
        at += size
    return kept[0] if len(kept) == 1 else replace(recipe, inputs=tuple(kept))


def _of_slice(recipe: Recipe, axis: int, start: int, stop: int) -> Recipe:
    (source,) = recipe.inputs
    first = int(recipe.get("start"))  # type: ignore[arg-type]
    if recipe.get("axis") == axis:
        return part(source, axis, first + start, first + stop)
    return replace(recipe, inputs=(part(source, axis, start, stop),))


def _kept(before: tuple[int, ...], after: tuple[int, ...], axis: int) -> int | None:
    """The axis of a reshape's input that is `axis` of its result, if there is one."""
    for i, size in enumerate(before):
        if size == after[axis] and prod(before[:i]) == prod(after[:axis]):
            return i
    return None
