"""Rules of elementwise ops: in goes a call on broadcasting operands, out comes one op, spelled in one way only."""

from collections.abc import Callable
from math import inf, isfinite, isinf

import torch

from planc.compiler.ir.types import Dim
from planc.compiler.lift.call import Call
from planc.compiler.lift.form import Form
from planc.compiler.lift.layout import arrange, placed, rows_first

Rule = Callable[[Call], Form]
Operand = Form | int | float

_SQRT = torch.ops.aten.sqrt.default
_POWERS = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
_COMMUTES = ("add", "mul", "maximum", "minimum")
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}


def unary(op: str) -> Rule:
    """A rule for an op of one tensor, in the result's dtype."""
    return lambda call: apply(call, op, own(call, "self"))


def own(call: Call, name: str) -> Form:
    """A tensor argument in the result's dtype."""
    return cast_to(call, call.form(name), call.dtype)


def apply(call: Call, op: str, x: Form, **attrs: float | bool) -> Form:
    """One elementwise op on one tensor, whose dtype is kept."""
    out = call.emit(op, x.name, **attrs)
    return Form(out.name, out.type, x.dims, x.axes)


def cast_to(call: Call, x: Form, dtype: str) -> Form:
    """The tensor in another dtype; the same form when nothing changes."""
    if x.type.dtype == dtype:
        return x
    out = call.emit("cast", x.name, dtype=dtype)
    return Form(out.name, out.type, x.dims, x.axes, _rounded(x.scalar, dtype))


def _rounded(number: float | None, dtype: str) -> float | None:
    """A known number in another dtype; None where that takes rounding."""
    if dtype == "f32" or number is None:
        return number
    return int(number) if dtype == "i32" and isfinite(number) else None


def same(call: Call) -> Form:
    """Ops that change nothing in a traced step: clone, contiguous, alias, detach."""
    call.implied("memory_format")
    return call.form("self")


def dropout(call: Call) -> Form:
    """Dropout, which must be off."""
    call.implied("p")
    if call.arg("train"):
        raise call.fail("dropout is on in a model that should be in eval mode")
    return call.form("input")


def binary(op: str) -> Rule:
    """A rule for an op of two operands, either of which may be a number."""
    return lambda call: combine(call, op, call.operand("self"), call.operand("other"))


def reversed_binary(op: str) -> Rule:
    """A rule for an op whose operands come in the other order, like rsub."""
    return lambda call: combine(call, op, call.operand("other"), call.operand("self"))


def combine(call: Call, op: str, a: Operand, b: Operand) -> Form:
    """`op` of two operands in the result's dtype and shape."""
    a, b = (cast_to(call, x, call.dtype).expand(call.dims) if isinstance(x, Form) else x for x in (a, b))
    return pair(call, op, a, b)


def pair(call: Call, op: str, a: Operand, b: Operand) -> Form:
    """`op` of two operands that broadcast; a number becomes the attribute `scalar`, a neutral one leaves no op."""
    if isinstance(a, Form) and isinstance(b, Form):
        return _pair(call, op, a, b).expand(_broadcast(call, a.dims, b.dims))
    return _pair(call, op, a, b)


def _pair(call: Call, op: str, a: Operand, b: Operand) -> Form:
    b = _number(b)
    a = _number(a) if isinstance(b, Form) else a  # of two known numbers one stays a tensor
    if isinstance(a, Form) and isinstance(b, Form):
        return _two(call, op, a, b)
    if isinstance(a, Form):
        return _with_number(call, op, a, b)  # type: ignore[arg-type]
    if isinstance(b, Form):
        return _with_number(call, op, b, a) if op in _COMMUTES else _number_first(call, op, a, b)
    raise call.fail("both operands are numbers")


def _with_number(call: Call, op: str, x: Form, b: int | float) -> Form:
    if b == _NEUTRAL.get(op):
        return x
    if isinf(b) or b != b:
        return _two(call, op, x, call.constant(torch.full((), b)))
    return apply(call, op, x, scalar=b)


def _number_first(call: Call, op: str, a: int | float, x: Form) -> Form:
    if op == "div" and a == 1:
        return _reciprocal(call, x, "other")
    if isinf(a) or a != a:
        return _two(call, op, call.constant(torch.full((), a)), x)
    return apply(call, op, x, scalar=a, reversed=True)


def _number(x: Operand) -> Operand:
    """A tensor of one known number as that number."""
    return x.scalar if isinstance(x, Form) and x.scalar is not None and not x.stored else x


def _two(call: Call, op: str, a: Form, b: Form) -> Form:
    dims = _broadcast(call, a.dims, b.dims)
    a, b = a.expand(dims), b.expand(dims)
    if op == "mul" and (a.name, a.axes) == (b.name, b.axes):
        return apply(call, "square", a)
    order = _common_order(dims, a, b)
    out = call.emit(op, *(arrange(call, x, _tail(x, order)) for x in (a, b)))
    return placed(out.name, out.type, dims, order)


def _broadcast(call: Call, a: tuple[Dim, ...], b: tuple[Dim, ...]) -> tuple[Dim, ...]:
    rank = max(len(a), len(b))
    out: list[Dim] = []
    for x, y in zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True):
        if 1 not in (x, y) and x != y:
            raise call.fail(f"{a} and {b} do not broadcast")
        out.append(y if x == 1 else x)
    return tuple(out)


def _common_order(dims: tuple[Dim, ...], a: Form, b: Form) -> list[int]:
    """The result's stored axes: in the order of the operand that has them all, else tokens first."""
    wide = max((a, b), key=lambda x: len(x.stored)).stored
    every = set(a.stored) | set(b.stored)
    return wide if set(wide) == every else rows_first(dims, sorted(every))


def _tail(x: Form, order: list[int]) -> list[int]:
    """`order` without the leading axes that the operand does not have: broadcasting adds those."""
    first = next((i for i, a in enumerate(order) if x.axes[a] is not None), len(order))
    return order[first:]


def power(call: Call) -> Form:
    """pow with a number as exponent; the common ones have names."""
    exponent = call.operand("exponent")
    if isinstance(exponent, float | int) and exponent in _POWERS:
        x = own(call, "self")
        return _reciprocal(call, x, "self") if exponent == -1 else apply(call, _POWERS[exponent], x)
    return combine(call, "pow", call.operand("self"), exponent)


def reciprocal(call: Call) -> Form:
    """1 / x, and 1 / sqrt(x) as one op."""
    return _reciprocal(call, own(call, "self"), "self")


def _reciprocal(call: Call, x: Form, argument: str) -> Form:
    made_by = call.source(argument)
    if made_by is not None and made_by.target is _SQRT:
        (inner,) = made_by.all_input_nodes
        return apply(call, "rsqrt", call.lifted(inner))
    return apply(call, "reciprocal", x)


def gelu(call: Call) -> Form:
    """gelu, exact or by tanh."""
    return apply(call, "gelu", call.form("self"), tanh=call.arg("approximate", "none") == "tanh")


def clamp(call: Call) -> Form:
    """clamp to numbers or tensors on either side."""
    x = own(call, "self")
    for name, op, neutral in (("min", "maximum", -inf), ("max", "minimum", inf)):
        bound = call.operand(name) if call.has(name) else neutral
        if bound != neutral:
            x = pair(call, op, x, cast_to(call, bound, call.dtype) if isinstance(bound, Form) else bound)
    return x


def hardtanh(call: Call) -> Form:
    """clip(x, min_val, max_val), which are -1 and 1 unless said."""
    return bounded(call, call.arg("min_val", -1), call.arg("max_val", 1))


def bounded(call: Call, low: float, high: float) -> Form:
    """clip(x, low, high)."""
    return apply(call, "minimum", apply(call, "maximum", own(call, "self"), scalar=low), scalar=high)
