"""Ops that move, order or pick elements, as ONNX."""

from collections.abc import Sequence
from typing import Any

from planc.compiler.ir.graph import Node
from planc.compiler.onnx_export.emitter import Emitter

ROWS = "logit_rows"  # the graph's input that says which rows have logits: in ONNX all have


def reshape(e: Emitter, n: Node) -> Sequence[str]:
    return (e.op("Reshape", e.value(n.inputs[0]), e.ints(*_shape(n))),)


def _shape(n: Node) -> tuple[int, ...]:
    shape: Any = n.attr("shape")
    return tuple(shape)


def transpose(e: Emitter, n: Node) -> Sequence[str]:
    return (e.op("Transpose", e.value(n.inputs[0]), perm=n.attr("perm")),)


def slice_(e: Emitter, n: Node) -> Sequence[str]:
    at: list[Any] = [n.attr(name) for name in ("start", "stop", "axis")]
    return (e.op("Slice", e.value(n.inputs[0]), *(e.ints(i) for i in at)),)


def concat(e: Emitter, n: Node) -> Sequence[str]:
    return (e.op("Concat", *(e.value(i) for i in n.inputs), axis=n.attr("axis")),)


def expand(e: Emitter, n: Node) -> Sequence[str]:
    """ONNX keeps an axis that is asked to be 1, as the token axis is here."""
    shape = _shape(n)
    if "rows" in dict(n.attrs):
        full = e.op("Concat", e.length(), e.ints(*shape[1:]), axis=0)
    else:
        full = e.ints(*(1 if d == -1 else d for d in shape))
    return (e.op("Expand", e.value(n.inputs[0]), full),)


def copy(e: Emitter, n: Node) -> Sequence[str]:
    return (e.op("Identity", e.value(n.inputs[0])),)


def cast(e: Emitter, n: Node) -> Sequence[str]:
    return (e.cast(e.value(n.inputs[0]), str(n.attr("dtype"))),)


def take_rows(e: Emitter, n: Node) -> Sequence[str]:
    return (e.op("Gather", e.value(n.inputs[0]), e.value(n.inputs[1])),)


def embedding(e: Emitter, n: Node) -> Sequence[str]:
    """Rows are picked before they are widened."""
    table, ids = n.inputs
    rows = e.op("Gather", e.value(table), e.value(ids))
    return (rows if e.type(table).dtype == "f32" else e.cast(rows, "f32"),)


_REDUCE = {"mean": "ReduceMean", "sum": "ReduceSum", "amax": "ReduceMax", "amin": "ReduceMin", "prod": "ReduceProd"}


def reduce(e: Emitter, n: Node) -> Sequence[str]:
    return (e.op(_REDUCE[n.op], e.value(n.inputs[0]), e.ints(-1), keepdims=1),)


def softmax(e: Emitter, n: Node) -> Sequence[str]:
    return (e.op("Softmax", e.value(n.inputs[0]), axis=-1),)


def cumsum(e: Emitter, n: Node) -> Sequence[str]:
    return (e.op("CumSum", e.value(n.inputs[0]), e.const(-1, "i64")),)


def argmax(e: Emitter, n: Node) -> Sequence[str]:
    return (e.cast(e.op("ArgMax", e.value(n.inputs[0]), axis=-1, keepdims=1), "i32"),)


def topk(e: Emitter, n: Node) -> Sequence[str]:
    """Of equals ONNX takes the lowest index first, as the graph does. A NaN has no place in its order."""
    k: Any = n.attr("k")
    values, index = e.ops("TopK", 2, e.value(n.inputs[0]), e.ints(k), axis=-1, largest=int(bool(n.attr("largest"))))
    return values, e.cast(index, "i32")


def gather(e: Emitter, n: Node) -> Sequence[str]:
    """GatherElements wants the axes before the last to be those of the index, and every index inside."""
    x, index = (_spread(e, i, n) for i in n.inputs)
    size = int(e.type(n.inputs[0]).shape[-1])
    if known_inside(e, n.inputs[1], size):
        return (e.op("GatherElements", x, index, axis=-1),)
    dtype = e.type(n.inputs[0]).dtype
    inside = within(e, index, size)
    picked = e.op("GatherElements", x, e.op("Where", inside, index, e.const(0, "i32")), axis=-1)
    return (e.op("Where", inside, picked, e.const(0, dtype)),)


def scatter(e: Emitter, n: Node) -> Sequence[str]:
    """What has an index outside goes to a column of its own, which is then left out."""
    x, index = (_spread(e, i, n) for i in n.inputs[:2])
    source = _source(e, n, index)
    size = int(e.type(n.inputs[0]).shape[-1])
    reduction = "add" if dict(n.attrs).get("add") else "none"
    if known_inside(e, n.inputs[1], size):
        return (e.op("ScatterElements", x, index, source, axis=-1, reduction=reduction),)
    aside = e.op("Where", within(e, index, size), index, e.const(size, "i32"))
    pads = [0] * len(n.out.type.shape)
    wide = e.op("Pad", x, e.ints(*pads, *pads[1:], 1))
    made = e.op("ScatterElements", wide, aside, source, axis=-1, reduction=reduction)
    return (e.op("Slice", made, e.ints(0), e.ints(size), e.ints(-1)),)


def _source(e: Emitter, n: Node, index: str) -> str:
    """What is written, in the shape of the index."""
    source = e.value(n.inputs[2]) if len(n.inputs) > 2 else e.const(n.attr("scalar"))
    same = len(n.inputs) > 2 and e.type(n.inputs[2]).shape == _spread_shape(e, n.inputs[1], n)
    return source if same else e.op("Expand", source, e.op("Shape", index))


def within(e: Emitter, index: str, size: int) -> str:
    """A boolean: 0 <= index < size."""
    return e.op("And", e.op("GreaterOrEqual", index, e.const(0, "i32")), e.op("Less", index, e.const(size, "i32")))


def _spread_shape(e: Emitter, name: str, n: Node) -> tuple[object, ...]:
    return (*n.out.type.shape[:-1], e.type(name).shape[-1])


def _spread(e: Emitter, name: str, n: Node) -> str:
    """The value with every axis but the last broadcast to those of the node's output."""
    t, value = e.type(name), e.value(name)
    if t.shape == _spread_shape(e, name, n):
        return value
    lead = n.out.type.shape[:-1]
    known = e.ints(*(d if isinstance(d, int) else 1 for d in lead), 1)
    if any(isinstance(d, str) for d in lead[:1]):
        known = e.op("Concat", e.length(), e.ints(*(int(d) for d in lead[1:]), 1), axis=0)
    return e.op("Expand", value, known)


_VIEWS = frozenset({"reshape", "slice", "copy", "transpose", "expand", "take_rows"})


def known_inside(e: Emitter, name: str, size: int) -> bool:
    """Whether an index is known to be one of `size` places: it was found among no more."""
    n = e.graph.producers.get(name)
    while n is not None and n.op in _VIEWS:
        name = n.inputs[0]
        n = e.graph.producers.get(name)
    if n is None or n.op not in ("topk", "argmax"):
        return False
    return name == n.outputs[-1].name and int(e.type(n.inputs[0]).shape[-1]) <= size
