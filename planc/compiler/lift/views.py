"""Rules of ops that move or select elements: in goes a call, out comes a relabelled form or an op."""

from collections.abc import Callable
from dataclasses import replace

from planc.compiler.ir.types import Dim
from planc.compiler.lift.call import Call
from planc.compiler.lift.form import Form
from planc.compiler.lift.layout import arrange, placed, regroup, rows_first, spread

Rule = Callable[[Call], Form]


def view(call: Call) -> Form:
    """view, reshape, flatten, unflatten: the result's shape says it all."""
    call.implied("size", "shape", "start_dim", "end_dim", "dim", "sizes")
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


def repeat(call: Call) -> Form:
    """repeat: an axis of size 1 is expanded, another one joined with itself."""
    repeats = call.arg("repeats")
    x = call.form("self")
    x = x.expand((1,) * (len(repeats) - len(x.dims)) + x.dims)
    for axis, times in enumerate(repeats):
        if times == 1:
            continue
        if x.dims[axis] == 1:
            x = x.expand([times if i == axis else d for i, d in enumerate(x.dims)])
        else:
            x = join(call, [x] * times, axis)
    return x


def repeat_interleave(call: Call) -> Form:
    """Each element of an axis repeated in place: a new axis after it, expanded and merged."""
    x, times = call.form("self"), call.arg("repeats")
    axis = _axis(call.arg("dim"), len(x.dims))
    order: list[int | None] = list(range(len(x.dims)))
    order.insert(axis + 1, None)
    wide = x.pick(order)
    wide = wide.expand([times if i == axis + 1 else d for i, d in enumerate(wide.dims)])
    return regroup(call, wide, call.dims)


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
    low, high, _ = slice(start, stop).indices(size)
    return narrow(call, x, axis, low, high) if step == 1 else _strided(call, x, axis, low, high, step)


def narrow(call: Call, x: Form, axis: int, start: int, stop: int) -> Form:
    """Elements start:stop of an axis."""
    dims = tuple(stop - start if i == axis else d for i, d in enumerate(x.dims))
    at = x.axes[axis]
    if at is None or (start, stop) == (0, x.dims[axis]):
        return replace(x, dims=dims)
    out = call.emit("slice", x.name, axis=at, start=start, stop=stop)
    return Form.of(out.name, out.type, dims, x.axes)


def _strided(call: Call, x: Form, axis: int, start: int, stop: int, step: int) -> Form:
    """Every step-th element: the axis split in two, and one column of it taken."""
    size = x.dims[axis]
    assert isinstance(size, int)
    if size % step or start >= step or stop < size:
        raise call.fail(f"elements {start}:{stop}:{step} of an axis of {size}")
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
    stored = sorted({a for x in parts for a in x.stored} | {axis})
    parts = [spread(call, x, stored) for x in parts]
    dims: list[Dim] = list(parts[0].dims)
    if any(isinstance(x.dims[axis], str) for x in parts):
        raise call.fail(f"joins along the {dims[axis]} axis, so a row would depend on where in the step it lies")
    dims[axis] = sum(int(x.dims[axis]) for x in parts)
    order = rows_first(dims, stored)
    out = call.emit("concat", *(arrange(call, x, order) for x in parts), axis=order.index(axis))
    return placed(out.name, out.type, dims, order)


def _axis(dim: int, rank: int) -> int:
    return dim % rank
