"""Rules of ops along one axis: in goes a call, out comes the op with that axis last in storage."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isinf

import torch

from planc.compiler.ir.graph import Value
from planc.compiler.ir.types import Dim
from planc.compiler.lift.call import Call
from planc.compiler.lift.form import Form
from planc.compiler.lift.layout import arrange, feature_order, placed, rows_first, spread
from planc.compiler.lift.pointwise import apply, cast_to, pair
from planc.compiler.lift.views import narrow

Rule = Callable[[Call], Form]
Rules = Callable[[Call], tuple[Form, ...]]


def _feature(call: Call, x: Form, axis: int) -> Form:
    """The tensor with `axis` stored. PlancError when it is the token axis: tokens mix in attention alone."""
    if isinstance(x.dims[axis], str):
        raise call.fail(f"works along the {x.dims[axis]} axis, so tokens would mix outside of attention")
    return spread(call, x, [axis])


def _axis(call: Call, x: Form) -> int:
    dim = call.arg("dim", -1)
    return int(-1 if dim is None else dim) % max(len(x.dims), 1)


def _dims(x: Form, axis: int, size: Dim) -> tuple[Dim, ...]:
    return tuple(size if i == axis else d for i, d in enumerate(x.dims))


def along(op: str) -> Rule:
    """A rule for an op that keeps the shape: softmax, cumsum."""

    def rule(call: Call) -> Form:
        call.implied("half_to_float", "dtype")
        x = cast_to(call, call.form("self"), "f32")
        axis = _axis(call, x)
        if op == "cumsum" and isinstance(x.dims[axis], str) and x.axes[axis] is None:
            return _counted(call, x, axis)
        x = _feature(call, x, axis)
        order = feature_order(x, last=axis)
        out = call.emit(op, arrange(call, x, order))
        return cast_to(call, placed(out.name, out.type, x.dims, order), call.dtype)

    return rule


def _counted(call: Call, x: Form, axis: int) -> Form:
    """The running sum of what is the same for every token: so much for each position up to its own."""
    tokens = call.tokens().pick([0 if i == axis else None for i in range(len(x.dims))])
    count = pair(call, "add", cast_to(call, tokens, "f32"), 1.0)
    return cast_to(call, pair(call, "mul", x, count), call.dtype)


def log_softmax(call: Call) -> Form:
    """log(softmax(x)), with the sum's logarithm subtracted."""
    call.implied("half_to_float", "dtype")
    x = cast_to(call, call.form("self"), "f32")
    axis = _axis(call, x)
    shifted = pair(call, "sub", x, _reduce(call, "amax", x, axis))
    total = _reduce(call, "sum", apply(call, "exp", shifted), axis)
    return pair(call, "sub", shifted, apply(call, "log", total))


def reduction(op: str) -> Rule:
    """A rule for a reduction over axes of features."""
    return lambda call: _reduced(call, op, call.form("self"))


def _reduced(call: Call, op: str, x: Form) -> Form:
    call.implied("dtype")
    asked = call.arg("dim")
    if asked is None or asked == []:
        asked = [i for i, d in enumerate(x.dims)]
    axes = sorted(d % len(x.dims) for d in ([asked] if isinstance(asked, int) else asked))
    x = cast_to(call, x, "f32")
    for axis in axes:
        x = _reduce(call, op, x, axis)
    x = cast_to(call, x, call.dtype)
    return x if call.arg("keepdim", False) else x.pick([i for i in range(len(x.dims)) if i not in axes])


def _reduce(call: Call, op: str, x: Form, axis: int) -> Form:
    """The axis reduced to size 1."""
    if x.dims[axis] == 1:
        return x
    if x.axes[axis] is None and op in ("mean", "amax", "amin"):
        return replace(x, dims=_dims(x, axis, 1))
    x = _feature(call, x, axis)
    order = feature_order(x, last=axis)
    out = call.emit(op, arrange(call, x, order))
    return placed(out.name, out.type, _dims(x, axis, 1), order)


def quantified(op: str) -> Rule:
    """any and all of truth values: a maximum, a minimum."""

    def rule(call: Call) -> Form:
        if not call.truth("self"):
            raise call.fail("any and all of numbers are not supported, of truth values alone")
        return reduction(op)(call)

    return rule


def spread_of(root: bool) -> Rule:
    """var and std: the mean squared distance from the mean, with torch's correction."""

    def rule(call: Call) -> Form:
        x = cast_to(call, call.form("self"), "f32")
        asked = call.arg("dim")
        asked = [asked] if isinstance(asked, int) else asked or range(len(x.dims))
        axes = [d % len(x.dims) for d in asked]
        given = call.arg("correction" if call.has("correction") else "unbiased")
        correction = 1 if given is None else float(given)
        count = 1
        for a in axes:
            size = x.dims[a]
            if isinstance(size, str):
                raise call.fail(f"works along the {size} axis, so tokens would mix outside of attention")
            count *= size
        if count <= correction:
            raise call.fail(f"the spread of {count} numbers, corrected by {correction}")
        mean = x
        for a in axes:
            mean = _reduce(call, "mean", mean, a)
        total = apply(call, "square", pair(call, "sub", x, mean))
        for a in axes:
            total = _reduce(call, "mean", total, a)
        scaled = pair(call, "mul", total, count / (count - correction))
        out = apply(call, "sqrt", scaled) if root else scaled
        return out if call.arg("keepdim", False) else out.pick([i for i in range(len(x.dims)) if i not in axes])

    return rule


def norm(call: Call) -> Form:
    """linalg_vector_norm and norm: of order 2, 1 or infinity."""
    call.implied("dtype")
    order = call.arg("ord" if call.has("ord") else "p", 2)
    order = 2 if order is None else float(order)
    if order not in (1, 2) and not (isinf(order) and order > 0):
        raise call.fail(f"a norm of order {order}, expected 1, 2 or infinity")
    x = cast_to(call, call.form("self"), "f32")
    if order == 2:
        return apply(call, "sqrt", _reduced(call, "sum", apply(call, "square", x)))
    return _reduced(call, "sum" if order == 1 else "amax", apply(call, "abs", x))


def extreme(op: str) -> Rules:
    """max and min along an axis: the value and where it lies."""

    def rule(call: Call) -> tuple[Form, ...]:
        x = call.form("self")
        axis = _axis(call, x)
        value = cast_to(call, _reduce(call, op, cast_to(call, x, "f32"), axis), x.type.dtype)
        place = _place(call, x if op == "amax" else apply(call, "neg", x), axis)
        drop = [i for i in range(len(x.dims)) if i != axis]
        keep = call.arg("keepdim", False)
        return tuple(v if keep else v.pick(drop) for v in (value, place))

    return rule


def argmax(call: Call) -> Form:
    """Where the largest value lies."""
    x = call.form("self")
    if call.arg("dim") is None and len(x.dims) != 1:
        raise call.fail(f"looks for the largest of all axes of {x.dims} at once")
    axis = _axis(call, x)
    place = _place(call, x, axis)
    return place if call.arg("keepdim", False) else place.pick([i for i in range(len(x.dims)) if i != axis])


def _place(call: Call, x: Form, axis: int) -> Form:
    x = _feature(call, cast_to(call, x, "f32"), axis)
    order = feature_order(x, last=axis)
    out = call.emit("argmax", arrange(call, x, order))
    return placed(out.name, out.type, _dims(x, axis, 1), order)


def topk(call: Call) -> tuple[Form, ...]:
    """The k best of an axis, sorted best first, and where they lie."""
    call.implied("sorted")
    return _best(call, int(call.arg("k")), bool(call.arg("largest", True)))


def sort(call: Call) -> tuple[Form, ...]:
    """A whole axis sorted, and where each element lay."""
    call.implied("stable")
    return _best(call, None, bool(call.arg("descending", False)))


def argsort(call: Call) -> Form:
    """Where each element of the sorted axis lay."""
    return sort(call)[1]


def _best(call: Call, k: int | None, largest: bool) -> tuple[Form, ...]:
    x = call.form("self")
    axis = _axis(call, x)
    whole = x.type.dtype
    x = _feature(call, cast_to(call, x, "f32"), axis)
    order = feature_order(x, last=axis)
    count = int(x.dims[axis]) if k is None else k
    outs: tuple[Value, ...] = call.emit_many("topk", arrange(call, x, order), k=count, largest=largest)
    values, places = (placed(v.name, v.type, _dims(x, axis, count), order) for v in outs)
    return cast_to(call, values, whole), places


def gather(call: Call) -> Form:
    """Elements of an axis by index."""
    call.implied("sparse_grad")
    x, index = call.form("self"), call.form("index")
    return take(call, x, index, _axis(call, x))


def take(call: Call, x: Form, index: Form, axis: int) -> Form:
    """x along `axis` at `index`, whose other axes are x's, or shorter."""
    x = _cut(call, _feature(call, x, axis), [d if i == axis else e for i, (d, e) in _beside(x, index)])
    index = spread(call, index, [axis])
    lead = sorted({a for a in (*x.stored, *index.stored) if a != axis})
    order = [*rows_first(index.dims, lead), axis]
    out = call.emit("gather", arrange(call, x, order), arrange(call, index, order))
    return placed(out.name, out.type, index.dims, order)


def _beside(x: Form, other: Form) -> "enumerate[tuple[Dim, Dim]]":
    return enumerate(zip(x.dims, other.dims, strict=True))


def _cut(call: Call, x: Form, dims: Sequence[Dim]) -> Form:
    """The first elements of each axis, as many as `dims` says."""
    for axis, (size, wanted) in enumerate(zip(x.dims, dims, strict=True)):
        if size != wanted:
            if isinstance(size, str) or isinstance(wanted, str):
                raise call.fail(f"takes some of the {size} axis, so a row would depend on where in the step it lies")
            x = narrow(call, x, axis, 0, wanted)
    return x


def scatter(call: Call) -> Form:
    """A copy of an axis with elements replaced, or added to, by index."""
    x, index = call.form("self"), call.form("index")
    add = "scatter_add" in str(call.node.target) or call.arg("reduce") in ("add", "sum")
    if call.arg("reduce") not in (None, "add", "sum"):
        raise call.fail(f"scatter that reduces by {call.arg('reduce')!r}")
    if not call.arg("include_self", True):
        raise call.fail("scatter that forgets what was there")
    axis, whole = _axis(call, x), x.type.dtype
    if any(i != axis and d != e for i, (d, e) in _beside(x, index)):
        raise call.fail(f"replaces elements of a part of {x.dims}, of {index.dims}")
    source = call.operand("src" if call.has("src") else "value")
    if isinstance(source, Form):
        source = spread(call, _cut(call, cast_to(call, source, "f32"), index.dims), [axis])
    varying = source.stored if isinstance(source, Form) else []
    x = spread(call, _feature(call, cast_to(call, x, "f32"), axis), sorted({*index.stored, *varying}))
    index = spread(call, index, [axis])
    order = [*rows_first(x.dims, [a for a in x.stored if a != axis]), axis]
    inputs, attrs = [arrange(call, x, order), arrange(call, index, order)], {"add": True} if add else {}
    if isinstance(source, Form):
        inputs.append(arrange(call, source, order))
    out = call.emit("scatter", *inputs, **attrs, **({} if isinstance(source, Form) else {"scalar": float(source)}))
    return cast_to(call, placed(out.name, out.type, x.dims, order), whole)


def one_hot(call: Call) -> Form:
    """1 where the id is the place along a new last axis."""
    ids, count = call.form("self"), int(call.arg("num_classes"))
    if count < 1:
        raise call.fail("one_hot without a number of classes")
    places = call.constant(torch.arange(count)).pick([*[None] * len(ids.dims), 0])
    wide = ids.pick([*range(len(ids.dims)), None])
    return cast_to(call, pair(call, "eq", wide, places), call.dtype)
