"""Experts as ONNX: a loop over those that were chosen, each of which sees its own rows alone.

Nothing is computed for an expert that no token chose, and one expert's weight at a time is widened to float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnx import GraphProto, TensorProto, helper

from planc.compiler.ir.graph import Node
from planc.compiler.ir.operands import Operands, operands, scheme_of
from planc.compiler.onnx_export.emitter import Emitter
from planc.compiler.onnx_export.quantized import gatherable, scaled_rows, widened
from planc.compiler.onnx_export.structure import known_inside, within


@dataclass(frozen=True)
class _Call:
    """A node's values: `rows` f32[.., K], of which `slots` chosen experts in a row share one; `chosen` i32[T * k]."""

    chosen: str
    active: str
    rows: str
    slots: int
    row_scales: str | None
    weight: Callable[[Emitter, str], str]
    bias: str | None


def expert_linear(e: Emitter, n: Node) -> Sequence[str]:
    x, ids, w, *bias = n.inputs
    given = Operands(x, None, ids, (w,), tuple(bias))
    return (_experts(e, given, e.wide(x), None, lambda e, expert: _plain(e, w, expert)),)


def qexpert_linear(e: Emitter, n: Node) -> Sequence[str]:
    given = operands(dict(n.attrs), n.inputs, experts=True)
    row = scheme_of(dict(n.attrs))

    parts = {name: gatherable(e, name) for name in given.parts}

    def weight(e: Emitter, expert: str) -> str:
        return widened(e, row, given.parts, lambda name: e.op("Gather", parts[name], expert))

    left = None if row.by_group else given.row_scales
    return (_experts(e, given, scaled_rows(e, row, given.x, given.row_scales), left, weight),)


def _plain(e: Emitter, w: str, expert: str) -> str:
    made = e.op("Gather", e.value(w), expert)
    return made if e.type(w).dtype == "f32" else e.cast(made, "f32")


def _experts(
    e: Emitter, given: Operands[str], wide: str, scales: str | None, weight: Callable[[Emitter, str], str]
) -> str:
    """y[t, j] = x[t, (j)] @ w[ids[t, j]].T (+ b): rows go to their experts, and what these make goes to its place.
    `wide` is x in float32, whose products lack the `scales`.
    """
    x, ids = given.x, given.ids
    assert ids is not None
    experts, size, width = (int(d) for d in e.type(given.parts[0]).shape)
    k = int(e.type(ids).shape[-1])
    chosen = e.once(f"{e.value(ids)}/chosen", lambda: _chosen(e, ids, k))
    active = e.once(f"{e.value(ids)}/active{experts}", lambda: _active(e, ids, chosen, experts))
    call = _Call(
        chosen=chosen,
        active=active,
        rows=e.op("Reshape", wide, e.ints(-1, width)),
        slots=k if len(e.type(x).shape) == 2 else 1,
        row_scales=e.op("Reshape", e.value(scales), e.ints(-1)) if scales else None,
        weight=weight,
        bias=e.wide(given.bias) if given.bias else None,
    )
    y, at = _loop(e, call, size)
    shape = e.op("Concat", e.op("Shape", chosen), e.ints(size), axis=0)
    placed = e.op("ScatterND", e.op("ConstantOfShape", shape), e.op("Unsqueeze", at, e.ints(-1)), y)
    return e.op("Reshape", placed, e.ints(-1, k, size))


def _chosen(e: Emitter, ids: str, k: int) -> str:
    """The expert of each slot of each token; one list for all tokens is repeated."""
    given = e.value(ids)
    if len(e.type(ids).shape) == 1:
        given = e.op("Expand", given, e.op("Concat", e.length(), e.ints(k), axis=0))
    return e.op("Reshape", given, e.ints(-1))


def _active(e: Emitter, ids: str, chosen: str, experts: int) -> str:
    """int64[n]: the experts that some slot chose, in order; an id that is none of them is left out."""
    size, at = experts, chosen
    if not known_inside(e, ids, experts):
        size, at = experts + 1, e.op("Where", within(e, chosen, experts), chosen, e.const(experts, "i32"))
    ones = e.op("Expand", e.const(1.0), e.op("Shape", chosen))
    seen = e.op("ScatterElements", e.op("ConstantOfShape", e.ints(size)), at, ones, axis=0)
    if size > experts:
        seen = e.op("Slice", seen, e.ints(0), e.ints(experts), e.ints(0))
    return e.op("Reshape", e.op("NonZero", seen), e.ints(-1))


def _loop(e: Emitter, call: _Call, size: int) -> tuple[str, str]:
    """What the experts make, f32[slots, N] expert by expert, and the slots that it belongs to, int64[slots].

    Both are gathered in sequences, which start with nothing of the right shape: an empty one cannot be joined.
    """
    made = e.op("SequenceConstruct", e.op("ConstantOfShape", e.ints(0, size)))
    places = e.op("SequenceConstruct", e.ints())
    count = e.op("Size", call.active)
    made, places = e.ops("Loop", 2, count, "", made, places, body=_body(e.body(), call))
    return e.op("ConcatFromSequence", made, axis=0), e.op("ConcatFromSequence", places, axis=0)


def _body(e: Emitter, call: _Call) -> GraphProto:
    """One expert: its rows, their product with its weight."""
    turn, go, made, places = (e.name(name) for name in ("turn", "go", "made", "places"))
    expert = e.op("Gather", call.active, turn)
    mine = e.op("Equal", call.chosen, e.cast(expert, "i32"))
    at = e.op("Reshape", e.op("NonZero", mine), e.ints(-1))
    row = e.op("Div", at, e.const(call.slots, "i64")) if call.slots > 1 else at
    y = e.op("Gemm", e.op("Gather", call.rows, row), call.weight(e, expert), transB=1)
    if call.row_scales:
        y = e.op("Mul", y, e.op("Unsqueeze", e.op("Gather", call.row_scales, row), e.ints(-1)))
    if call.bias:
        y = e.op("Add", y, e.op("Gather", call.bias, expert))
    results = [e.op("Identity", go), e.op("SequenceInsert", made, y), e.op("SequenceInsert", places, at)]
    sequences = [(TensorProto.FLOAT, made, results[1]), (TensorProto.INT64, places, results[2])]
    inputs = [helper.make_tensor_value_info(turn, TensorProto.INT64, ())]
    inputs += [helper.make_tensor_value_info(go, TensorProto.BOOL, ())]
    inputs += [helper.make_tensor_sequence_value_info(name, kind, None) for kind, name, _ in sequences]
    outputs = [helper.make_tensor_value_info(results[0], TensorProto.BOOL, ())]
    outputs += [helper.make_tensor_sequence_value_info(name, kind, None) for kind, _, name in sequences]
    return helper.make_graph(e.nodes, "expert", inputs, outputs)
