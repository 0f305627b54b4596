"""Rules of comparisons, conditions and truth values: in goes a call, out come numbers, 1.0 for true, 0.0 for false."""

from collections.abc import Callable, Sequence

import torch

from planc.compiler.lift.call import Call
from planc.compiler.lift.form import Form
from planc.compiler.lift.layout import arrange, placed, rows_first
from planc.compiler.lift.pointwise import Operand, apply, cast_to, combine, pair

Rule = Callable[[Call], Form]


def compare(op: str) -> Rule:
    """A rule for a comparison of two operands; integers meet as integers, anything else as float32."""

    def rule(call: Call) -> Form:
        a, b = call.operand("self"), call.operand("other")
        whole = all(x.type.dtype == "i32" if isinstance(x, Form) else float(x).is_integer() for x in (a, b))
        dtype = "i32" if whole else "f32"
        a, b = (cast_to(call, x, dtype) if isinstance(x, Form) else x for x in (a, b))
        return pair(call, op, a, b)

    return rule


def negate(call: Call) -> Form:
    """not x, of a truth value; logical_not of a number asks whether it is zero."""
    if "logical" in str(call.node.target) and not call.truth("self"):
        return pair(call, "eq", call.form("self"), 0)
    return pair(call, "sub", 1.0, _truth(call, "self"))


def both(op: str) -> Rule:
    """and, or, xor of two truth values: a product, a maximum, a difference."""
    return lambda call: pair(call, op, _truth(call, "self"), _truth(call, "other"))


def _truth(call: Call, name: str) -> Form:
    if not call.truth(name):
        raise call.fail(f"{name} holds integers, whose bits are not supported")
    return call.form(name)


def where(call: Call) -> Form:
    """condition ? self : other."""
    return choose(call, call.form("condition"), call.operand("self"), call.operand("other"))


def masked_fill(call: Call) -> Form:
    """mask ? value : self."""
    return choose(call, call.form("mask"), call.operand("value"), call.form("self"))


def choose(call: Call, condition: Form, a: Operand, b: Operand) -> Form:
    """Elementwise choice; numbers become constants, so that infinities stay what they are."""
    c, x, y = (v.expand(call.dims) for v in (condition, _tensor(call, a), _tensor(call, b)))
    order = _order(call, (c, x, y))
    out = call.emit("where", *(arrange(call, v, _tail(v, order)) for v in (c, x, y)))
    return placed(out.name, out.type, call.dims, order)


def _tensor(call: Call, x: Operand) -> Form:
    if isinstance(x, Form):
        return cast_to(call, x, call.dtype)
    dtype = torch.int64 if call.dtype == "i32" else torch.float32
    return call.constant(torch.full((), x, dtype=dtype))


def _order(call: Call, forms: Sequence[Form]) -> list[int]:
    every = {a for x in forms for a in x.stored}
    widest = max(forms, key=lambda x: len(x.stored)).stored
    return widest if set(widest) == every else rows_first(call.dims, sorted(every))


def _tail(x: Form, order: list[int]) -> list[int]:
    first = next((i for i, a in enumerate(order) if x.axes[a] is not None), len(order))
    return order[first:]


def leaky_relu(call: Call) -> Form:
    """x where positive, a fraction of it elsewhere."""
    x = call.form("self")
    small = pair(call, "mul", x, float(call.arg("negative_slope", 0.01)))
    return choose(call, pair(call, "gt", x, 0.0), x, small)


def elu(call: Call) -> Form:
    """x where positive, alpha (exp(x) - 1) elsewhere, both scaled."""
    x = call.form("self")
    alpha, scale, inner = (float(call.arg(n, 1.0)) for n in ("alpha", "scale", "input_scale"))
    low = pair(call, "mul", apply(call, "expm1", pair(call, "mul", x, inner)), alpha)
    return pair(call, "mul", choose(call, pair(call, "gt", x, 0.0), x, low), scale)


def hard(slope: float, shift: float, by_x: bool) -> Rule:
    """hardsigmoid and hardswish: clip(slope x + shift, 0, 1), times x."""

    def rule(call: Call) -> Form:
        x = call.form("self")
        line = pair(call, "add", pair(call, "mul", x, slope), shift)
        y = pair(call, "minimum", pair(call, "maximum", line, 0.0), 1.0)
        return pair(call, "mul", x, y) if by_x else y

    return rule


def mish(call: Call) -> Form:
    """x tanh(softplus(x))."""
    x = call.form("self")
    return pair(call, "mul", x, apply(call, "tanh", apply(call, "softplus", x)))


def softplus(call: Call) -> Form:
    """log(1 + exp(beta x)) / beta; torch gives x itself above a threshold, and from 20 on the two agree in float32."""
    x, beta, threshold = call.form("self"), float(call.arg("beta", 1)), float(call.arg("threshold", 20))
    scaled = pair(call, "mul", x, beta)
    y = pair(call, "div", apply(call, "softplus", scaled), beta)
    return y if threshold >= 20 else choose(call, pair(call, "gt", scaled, threshold), x, y)


def log_sigmoid(call: Call) -> Form:
    """-softplus(-x)."""
    return apply(call, "neg", apply(call, "softplus", apply(call, "neg", call.form("self"))))


def divide(call: Call) -> Form:
    """div with a rounding mode."""
    a, b, mode = call.operand("self"), call.operand("other"), call.arg("rounding_mode")
    if mode == "floor":
        return combine(call, "floor_divide", a, b)
    if mode == "trunc" and call.dtype == "f32":
        return apply(call, "trunc", combine(call, "div", a, b))
    return _towards_zero(call, a, b) if mode == "trunc" else combine(call, "div", a, b)


def _towards_zero(call: Call, a: Operand, b: Operand) -> Form:
    """Of integers: one more than the floor where that is negative and something is left."""
    low = combine(call, "floor_divide", a, b)
    left = pair(call, "ne", combine(call, "remainder", a, b), 0)
    more = pair(call, "mul", left, pair(call, "lt", low, 0))
    return pair(call, "add", low, cast_to(call, more, call.dtype))


def scaled_sum(op: str) -> Rule:
    """addcmul, addcdiv: self + value (a op b)."""

    def rule(call: Call) -> Form:
        term = combine(call, op, call.form("tensor1"), call.form("tensor2"))
        return combine(call, "add", call.form("self"), pair(call, "mul", term, float(call.arg("value", 1))))

    return rule


def cast(call: Call) -> Form:
    """to, _to_copy, type_as: only the dtype matters here; a number turned into a truth value is compared with zero."""
    call.implied("dtype", "device", "other", "layout", "non_blocking", "copy", "memory_format", "pin_memory")
    x = call.form("self")
    if call.is_truth and not call.truth("self"):
        return pair(call, "ne", x, 0.0 if x.type.dtype == "f32" else 0)
    return cast_to(call, x, call.dtype)
