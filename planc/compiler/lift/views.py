"""Rules of ops that move or select elements: in goes a call, out comes a relabelled form or an op."""

from collections.abc import Callable
from dataclasses import replace

import torch

from planc.compiler.ir.types import Dim
from planc.compiler.lift.call import Call
from planc.compiler.lift.form import Form
from planc.compiler.lift.layout import arrange, placed, regroup, rows_first, spread
from planc.compiler.lift.pointwise import cast_to

Rule = Callable[[Call], Form]


def view(call: Call) -> Form:
    """view, reshape, flatten, unflatten: the result's shape says it all."""
    call.implied("size", "shape", "start_dim", "end_dim", "dim", "sizes", "other")
    return regroup(call, call.form("self"), call.dims)


def unsqueeze(call: Call) -> Form:
    """A new axis of size 1."""
    x = call.form("self")
    order: list[int | None] = list(range(len(x.dims)))
    order.insert(_axis(call.arg("dim"), len(x.dims) + 1), None)
    return x.pick(order)


def squeeze(call: Call) -> Form:
    """Axes of size 1 removed; the result's shape says which."""
    x = call.form("self")
    asked = call.arg("dim")
    dims = range(len(x.dims)) if asked is None else [asked] if isinstance(asked, int) else asked
    gone = {_axis(d, len(x.dims)) for d in dims}
    return x.pick([i for i, d in enumerate(x.dims) if not (i in gone and d == 1)])


def transpose(call: Call) -> Form:
    """Two axes swapped."""
    x = call.form("self")
    order = list(range(len(x.dims)))
    names = ("axis0", "axis1") if call.has("axis0") else ("dim0", "dim1")
    a, b = (_axis(call.arg(n), len(order)) for n in names)
    order[a], order[b] = order[b], order[a]
    return x.pick(order)


def flip_axes(call: Call) -> Form:
    """t, and the property T: the axes in reverse."""
    x = call.form("self")
    return x.pick(list(reversed(range(len(x.dims)))))


def transpose_last(call: Call) -> Form:
    """The property mT: the last two axes swapped."""
    x = call.form("self")
    rank = len(x.dims)
    return x.pick([*range(rank - 2), rank - 1, rank - 2])


def permute(call: Call) -> Form:
    """The axes in a new order."""
    x = call.form("self")
    return x.pick([_axis(d, len(x.dims)) for d in call.arg("dims")])


def movedim(call: Call) -> Form:
    """One axis moved."""
    x = call.form("self")
    source, target = (_axis(call.arg(n), len(x.dims)) for n in ("source", "destination"))
    order = [i for i in range(len(x.dims)) if i != source]
    order.insert(target, source)
    return x.pick(order)


def expand(call: Call) -> Form:
    """expand, expand_as, broadcast_to: axes along which the value does not vary."""
    call.implied("size", "other")
    return call.form("self").expand(call.dims)


def broadcast(call: Call) -> tuple[Form, ...]:
    """broadcast_tensors: each in the shape that all have together."""
    dims = [call.dims_of(part) for part in call.node.meta["val"]]
    return tuple(x.expand(d) for x, d in zip(call.forms("tensors"), dims, strict=True))


def repeat(call: Call) -> Form:
    """repeat: an axis of size 1 is expanded, another one joined with itself."""
    asked = call.sizes("dims" if call.has("dims") else "repeats")
    x = call.form("self")
    repeats: list[Dim] = [*[1] * (len(x.dims) - len(asked)), *asked]
    x = x.expand((1,) * (len(repeats) - len(x.dims)) + x.dims)
    if times := next((n for n, d in zip(repeats, x.dims, strict=True) if n != 1 and isinstance(d, str)), 0):
        if repeats.count(1) != len(repeats) - 1:
            raise call.fail(f"repeats tokens and more, {repeats} times")
        at = next(i for i, n in enumerate(repeats) if n != 1)
        order: list[int | None] = list(range(len(x.dims)))
        order.insert(at, None)
        wide = x.pick(order)
        return wide.expand([times if i == at else d for i, d in enumerate(wide.dims)])
    for axis, times in enumerate(repeats):
        if times == 1:
            continue
        if x.dims[axis] == 1:
            x = x.expand([times if i == axis else d for i, d in enumerate(x.dims)])
        elif isinstance(times, str):
            raise call.fail(f"repeats an axis of {x.dims[axis]} once for each token, which no packed step can hold")
        else:
            x = join(call, [x] * times, axis)
    return x


def repeat_interleave(call: Call) -> Form:
    """Each element of an axis repeated in place: a new axis after it, expanded and merged."""
    call.implied("output_size")
    x, times, dim = call.form("self"), call.arg("repeats"), call.arg("dim")
    if dim is None:
        raise call.fail("repeats the elements of all axes at once, tokens among them")
    axis = _axis(dim, len(x.dims))
    order: list[int | None] = list(range(len(x.dims)))
    order.insert(axis + 1, None)
    wide = x.pick(order)
    wide = wide.expand([times if i == axis + 1 else d for i, d in enumerate(wide.dims)])
    return wide if isinstance(x.dims[axis], str) else regroup(call, wide, call.dims)


def slice_(call: Call) -> Form:
    """A range of one axis, with a step if need be."""
    x = call.form("self")
    axis = _axis(call.arg("dim", 0), len(x.dims))
    start, stop, step = call.arg("start"), call.arg("end"), call.arg("step", 1)
    size = x.dims[axis]
    if step == 1 and call.dims == x.dims:
        return x
    if isinstance(size, str):
        raise call.fail(f"takes some of the {size} axis, so a row would depend on where in the step it lies")
    if isinstance(start, str) or isinstance(stop, str):
        raise call.fail(f"takes {start or 0}:{stop} of an axis of {size}, as many as the step has tokens")
    low, high, _ = slice(start, stop).indices(size)
    return narrow(call, x, axis, low, high) if step == 1 else _strided(call, x, axis, low, high, step)


def narrow(call: Call, x: Form, axis: int, start: int, stop: int) -> Form:
    """Elements start:stop of an axis."""
    dims = tuple(stop - start if i == axis else d for i, d in enumerate(x.dims))
    at = x.axes[axis]
    if at is None or (start, stop) == (0, x.dims[axis]):
        return replace(x, dims=dims)
    whole = _joined_part(call, x.name, at, start, stop)
    if whole is not None:
        return Form.of(whole, call.type_of(whole), dims, x.axes)
    out = call.emit("slice", x.name, axis=at, start=start, stop=stop)
    return Form.of(out.name, out.type, dims, x.axes)


def _joined_part(call: Call, name: str, axis: int, start: int, stop: int) -> str | None:
    """The value that a concat put at start:stop of `axis`, when it is one of its parts; so what is overwritten dies."""
    node = call.builder.made_by.get(name)
    if node is None or node.op != "concat" or node.attr("axis") != axis:
        return None
    at = 0
    for part in node.inputs:
        size = int(call.type_of(part).shape[axis])
        if (at, at + size) == (start, stop):
            return part
        at += size
    return None


def _strided(call: Call, x: Form, axis: int, start: int, stop: int, step: int) -> Form:
    """Every step-th element: the axis split in two, and one column of it taken."""
    size = x.dims[axis]
    assert isinstance(size, int)
    if size % step or start >= step or stop < size:
        return join(call, [narrow(call, x, axis, i, i + 1) for i in range(start, stop, step)], axis)
    split = (*x.dims[:axis], size // step, step, *x.dims[axis + 1 :])
    column = narrow(call, regroup(call, x, split), axis + 1, start, start + 1)
    return column.pick([i for i in range(len(split)) if i != axis + 1])


def select(call: Call) -> Form:
    """One element of an axis, which vanishes."""
    x = call.form("self")
    return pick_one(call, x, _axis(call.arg("dim"), len(x.dims)), call.arg("index"))


def pick_one(call: Call, x: Form, axis: int, index: int) -> Form:
    """Element `index` of an axis of known size."""
    size = x.dims[axis]
    if isinstance(size, str):
        raise call.fail(f"takes one of the {size} axis, so a row would depend on where in the step it lies")
    index %= size
    one = narrow(call, x, axis, index, index + 1)
    return one.pick([i for i in range(len(x.dims)) if i != axis])


def pieces(call: Call) -> tuple[Form, ...]:
    """split, split_with_sizes, chunk: consecutive ranges, their sizes read from the results."""
    call.implied("split_size", "split_sizes", "chunks")
    x = call.form("self")
    axis = _axis(call.arg("dim", 0), len(x.dims))
    found, start = [], 0
    for part in call.node.meta["val"]:
        size = part.shape[axis]
        if not isinstance(size, int) or isinstance(x.dims[axis], str):
            raise call.fail(f"splits the {x.dims[axis]} axis, so a row would depend on where in the step it lies")
        found.append(narrow(call, x, axis, start, start + size))
        start += size
    return tuple(found)


def unbind(call: Call) -> tuple[Form, ...]:
    """Each element of an axis on its own."""
    x = call.form("self")
    axis = _axis(call.arg("dim", 0), len(x.dims))
    return tuple(pick_one(call, x, axis, i) for i in range(len(call.node.meta["val"])))


def cat(call: Call) -> Form:
    """Tensors joined along an axis; empty ones have no part in it."""
    parts = [x for x in call.forms("tensors") if 0 not in x.dims]
    return join(call, parts, _axis(call.arg("dim", 0), len(call.dims)))


def stack(call: Call) -> Form:
    """Tensors joined along a new axis."""
    parts = call.forms("tensors")
    axis = _axis(call.arg("dim", 0), len(call.dims))
    order: list[int | None] = list(range(len(call.dims) - 1))
    order.insert(axis, None)
    return join(call, [x.pick(order) for x in parts], axis)


def join(call: Call, parts: list[Form], axis: int) -> Form:
    """Tensors joined along `axis`, in one storage order."""
    if len(parts) == 1:
        return parts[0]
    parts = [cast_to(call, x, call.dtype) for x in parts] if len({x.type.dtype for x in parts}) > 1 else parts
    stored = sorted({a for x in parts for a in x.stored} | {axis})
    parts = [spread(call, x, stored) for x in parts]
    dims: list[Dim] = list(parts[0].dims)
    if any(isinstance(x.dims[axis], str) for x in parts):
        raise call.fail(f"joins along the {dims[axis]} axis, so a row would depend on where in the step it lies")
    dims[axis] = sum(int(x.dims[axis]) for x in parts)
    order = rows_first(dims, stored)
    out = call.emit("concat", *(arrange(call, x, order) for x in parts), axis=order.index(axis))
    return placed(out.name, out.type, dims, order)


def slice_scatter(call: Call) -> Form:
    """x with a range of one axis replaced: what is before, the source, what is after."""
    x, source = call.form("self"), call.form("src")
    axis = _axis(call.arg("dim", 0), len(x.dims))
    start, stop, step = call.arg("start"), call.arg("end"), call.arg("step", 1)
    size = x.dims[axis]
    if isinstance(size, str):
        if (start or 0, step) == (0, 1) and source.dims == x.dims:
            return source
        raise call.fail(f"replaces {start}:{stop}:{step} of the {size} axis")
    source = cast_to(call, source, x.type.dtype)
    low, high, _ = slice(start, stop).indices(size)
    if step != 1:
        chosen = {i: n for n, i in enumerate(range(low, high, step))}
        one = [(source, chosen[i]) if i in chosen else (x, i) for i in range(size)]
        return join(call, [narrow(call, form, axis, i, i + 1) for form, i in one], axis)
    parts = [narrow(call, x, axis, 0, low)] if low else []
    parts.append(source)
    return join(call, parts + ([narrow(call, x, axis, high, size)] if high < size else []), axis)


def select_scatter(call: Call) -> Form:
    """x with one element of an axis replaced."""
    x = call.form("self")
    axis = _axis(call.arg("dim"), len(x.dims))
    at, size = call.arg("index"), x.dims[axis]
    if isinstance(size, str):
        raise call.fail(f"replaces one of the {size} axis")
    at %= size
    order: list[int | None] = list(range(len(x.dims) - 1))
    order.insert(axis, None)
    parts = [narrow(call, x, axis, 0, at)] if at else []
    parts.append(cast_to(call, call.form("src").pick(order), x.type.dtype))
    return join(call, parts + ([narrow(call, x, axis, at + 1, size)] if at + 1 < size else []), axis)


def copy(call: Call) -> Form:
    """copy: the source in the other's dtype and shape."""
    call.implied("self", "non_blocking")
    return cast_to(call, call.form("src"), call.dtype).expand(call.dims)


def pad(call: Call) -> Form:
    """Axes of features grown by a constant at either end."""
    x, sizes, value = call.form("self"), list(call.arg("pad")), call.arg("value", 0) or 0
    for i in range(0, len(sizes), 2):
        axis = len(x.dims) - 1 - i // 2
        for size, first in ((sizes[i], True), (sizes[i + 1], False)):
            if size == 0:
                continue
            if isinstance(x.dims[axis], str) or size < 0:
                raise call.fail(f"pads the {x.dims[axis]} axis by {size}, so tokens would mix outside of attention")
            dims = tuple(size if j == axis else d for j, d in enumerate(x.dims))
            edge = cast_to(call, call.constant(torch.full((), float(value))), x.type.dtype).expand(dims)
            x = join(call, [edge, x] if first else [x, edge], axis)
    return x


def flip(call: Call) -> Form:
    """Axes of features in reverse."""
    x = call.form("self")
    for axis in (_axis(d, len(x.dims)) for d in call.arg("dims")):
        size = x.dims[axis]
        if isinstance(size, str):
            raise call.fail(f"reverses the {size} axis")
        x = join(call, [narrow(call, x, axis, i, i + 1) for i in reversed(range(size))], axis)
    return x


def roll(call: Call) -> Form:
    """Axes of features turned around."""
    x, shifts, dims = call.form("self"), call.arg("shifts"), call.arg("dims", [])
    if len(shifts) != len(dims):
        raise call.fail("turns all axes around as one, tokens among them")
    for shift, dim in zip(shifts, dims, strict=True):
        axis = _axis(dim, len(x.dims))
        size = x.dims[axis]
        if isinstance(size, str):
            raise call.fail(f"turns the {size} axis around, so tokens would mix outside of attention")
        cut = -shift % size
        if cut:
            x = join(call, [narrow(call, x, axis, cut, size), narrow(call, x, axis, 0, cut)], axis)
    return x


def _axis(dim: int, rank: int) -> int:
    return dim % rank
