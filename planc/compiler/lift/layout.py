"""Storage order: in goes a form and the axes that an op wants, out comes a value that lies so, by few ops."""

from collections.abc import Sequence
from dataclasses import replace

from planc.compiler.ir.types import Dim, TensorType
from planc.compiler.lift.call import Call
from planc.compiler.lift.form import Form


def arrange(call: Call, form: Form, order: Sequence[int | None]) -> str:
    """A value whose axes are the tensor's axes `order`, in that order; None and axes not stored give size 1."""
    stored = [a for a in order if a is not None and form.axes[a] is not None]
    if sorted(stored) != sorted(form.stored):
        raise call.fail(f"axes {sorted(set(form.stored) - set(stored))} of {form.dims} have no place in the result")
    name = _transposed(call, form, [form.axes[a] for a in stored])
    return reshaped(call, name, [form.dims[a] if a in stored else 1 for a in order])  # type: ignore[index]


def _transposed(call: Call, form: Form, axes: Sequence[int | None]) -> str:
    wanted = [a for a in axes if a is not None]
    if wanted == sorted(wanted):
        return form.name
    if form.has_rows and wanted[0] != 0:
        raise call.fail(f"tokens would no longer be the first axis of {form.dims}")
    perm = (*wanted, *(a for a in range(len(form.type.shape)) if a not in wanted))
    return call.emit("transpose", form.name, perm=perm).name


def reshaped(call: Call, name: str, shape: Sequence[Dim]) -> str:
    """The value with its features regrouped to `shape`."""
    made = call.type_of(name)
    if made.shape == tuple(shape):
        return name
    if has_gaps(made) or (len(shape) == 1 and made.layout != "row"):  # a vector has no strides to keep tokens apart
        name = call.emit("copy", name).name
    sizes = [-1 if isinstance(d, str) else d for d in shape]
    return call.emit("reshape", name, shape=tuple(sizes)).name


def has_gaps(made: TensorType) -> bool:
    """Whether the features of one row do not lie densely."""
    return made.layout != "row" and made.strides()[1:] != TensorType(made.dtype, made.shape).strides()[1:]


def feature_order(form: Form, last: int | None = None) -> list[int]:
    """The stored axes in storage order; `last`, when given, moved to the end (or added there)."""
    order = [a for a in form.stored if a != last]
    return order if last is None else [*order, last]


def rows_first(dims: Sequence[Dim], axes: Sequence[int]) -> list[int]:
    """Axes in the tensor's own order, the token axis first."""
    return sorted(axes, key=lambda a: (isinstance(dims[a], int), a))


def placed(name: str, made: TensorType, dims: Sequence[Dim], order: Sequence[int | None]) -> Form:
    """The form of a value whose axes are the tensor's axes `order`."""
    at = {axis: i for i, axis in enumerate(order)}
    return Form.of(name, made, dims, [at.get(i) for i in range(len(dims))])


def spread(call: Call, form: Form, axes: Sequence[int]) -> Form:
    """The form with the expanded axes among `axes` really repeated, since regrouping or joining needs the copies."""
    missing = [a for a in dict.fromkeys(axes) if form.axes[a] is None and form.dims[a] != 1]
    if not missing:
        return form
    order = rows_first(form.dims, sorted([*form.stored, *missing]))
    name = arrange(call, form, order)
    shape = [-1 if isinstance(form.dims[a], str) else int(form.dims[a]) for a in order]
    new = [form.dims[a] for a in missing if isinstance(form.dims[a], str)]
    out = call.emit("expand", name, shape=tuple(shape), **({"rows": new[0]} if new else {}))
    return replace(placed(out.name, out.type, form.dims, order), scalar=form.scalar)


def regroup(call: Call, form: Form, dims: Sequence[Dim]) -> Form:
    """The tensor viewed with shape `dims`: free while axes stay whole, a reshape when features merge or split."""
    groups = _groups(call, form.dims, dims)
    if all(len(old) == len(new) == 1 for old, new in groups):
        axes: list[int | None] = [None] * len(dims)
        for (old,), (new,) in groups:
            axes[new] = form.axes[old]
        return Form(form.name, form.type, tuple(dims), tuple(axes), form.scalar)
    form = spread(call, form, [a for old, new in groups if len(old) != 1 or len(new) != 1 for a in old])
    kept = [(old, new) for old, new in groups if any(form.axes[a] is not None for a in old)]
    kept.sort(key=lambda g: isinstance(form.dims[g[0][0]], int))  # the token axis first, the rest in order
    name = arrange(call, form, [a for old, _ in kept for a in old])
    order = [a for _, new in kept for a in new]
    name = reshaped(call, name, [dims[a] for a in order])
    return placed(name, call.type_of(name), dims, order)


def _groups(call: Call, old: Sequence[Dim], new: Sequence[Dim]) -> list[tuple[list[int], list[int]]]:
    """Which old axes become which new axes, smallest groups first; axes of size 1 are in no group."""
    left = [i for i, d in enumerate(old) if d != 1]
    right = [i for i, d in enumerate(new) if d != 1]
    groups = []
    while left and right:
        a, b = [left.pop(0)], [right.pop(0)]
        while (x := _size(old, a)) != (y := _size(new, b)):
            if isinstance(x, str) or isinstance(y, str) or not (left if x < y else right):
                raise call.fail(
                    f"{tuple(old)} to {tuple(new)} merges or splits the token axis, which a packed step cannot"
                )
            (a if x < y else b).append((left if x < y else right).pop(0))
        groups.append((a, b))
    if left or right:
        raise call.fail(f"{tuple(old)} does not regroup to {tuple(new)}")
    return groups


def _size(dims: Sequence[Dim], axes: Sequence[int]) -> Dim:
    """Elements of these axes; a lone symbol stays one, a symbol among others is no size (0)."""
    if len(axes) == 1:
        return dims[axes[0]]
    size = 1
    for a in axes:
        d = dims[a]
        size *= d if isinstance(d, int) else 0
    return size
