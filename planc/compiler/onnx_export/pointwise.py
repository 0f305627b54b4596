"""Pointwise ops as ONNX: one value or two that broadcast, comparisons, choices, fused chains."""

from collections.abc import Callable, Mapping, Sequence

from planc.compiler.ir import fused
from planc.compiler.ir.graph import Node
from planc.compiler.ir.infer import broadcast
from planc.compiler.onnx_export.emitter import Emitter

Unary = Callable[[Emitter, str], str]
Binary = Callable[[Emitter, str, str], str]


def _one(kind: str) -> Unary:
    return lambda e, x: e.op(kind, x)


def _two(kind: str) -> Binary:
    return lambda e, a, b: e.op(kind, a, b)


def _rsqrt(e: Emitter, x: str) -> str:
    return e.op("Reciprocal", e.op("Sqrt", x))


def _silu(e: Emitter, x: str) -> str:
    return e.op("Mul", x, e.op("Sigmoid", x))


def _relu2(e: Emitter, x: str) -> str:
    y = e.op("Relu", x)
    return e.op("Mul", y, y)


def _trunc(e: Emitter, x: str) -> str:
    return e.op("Mul", e.op("Sign", x), e.op("Floor", e.op("Abs", x)))


def _sign(e: Emitter, x: str) -> str:
    """ONNX leaves open what the sign of a NaN is; here it is 0."""
    zero = e.const(0.0)
    return e.op("Sub", e.truth(e.op("Greater", x, zero)), e.truth(e.op("Less", x, zero)))


def _expm1(e: Emitter, x: str) -> str:
    """In float64, where e^x - 1 has the digits that float32 loses near 0."""
    one = e.double(e.const(1.0))
    return e.cast(e.op("Sub", e.op("Exp", e.double(x)), one), "f32")


def _log1p(e: Emitter, x: str) -> str:
    one = e.double(e.const(1.0))
    return e.cast(e.op("Log", e.op("Add", e.double(x), one)), "f32")


UNARY: Mapping[str, Unary] = {
    "neg": _one("Neg"),
    "abs": _one("Abs"),
    "exp": _one("Exp"),
    "log": _one("Log"),
    "sqrt": _one("Sqrt"),
    "rsqrt": _rsqrt,
    "reciprocal": _one("Reciprocal"),
    "square": lambda e, x: e.op("Mul", x, x),
    "cos": _one("Cos"),
    "sin": _one("Sin"),
    "tanh": _one("Tanh"),
    "erf": _one("Erf"),
    "sigmoid": _one("Sigmoid"),
    "silu": _silu,
    "relu": _one("Relu"),
    "softplus": _one("Softplus"),
    "floor": _one("Floor"),
    "ceil": _one("Ceil"),
    "trunc": _trunc,
    "round": _one("Round"),
    "sign": _sign,
    "expm1": _expm1,
    "log1p": _log1p,
}
WHOLE_UNARY: Mapping[str, Unary] = {**UNARY, "sign": _one("Sign")}  # of integers
ACTS: Mapping[str, Unary] = {
    **{name: UNARY[name] for name in ("silu", "relu", "sigmoid", "tanh")},
    "gelu": lambda e, x: e.op("Gelu", x),
    "gelu_tanh": lambda e, x: e.op("Gelu", x, approximate="tanh"),
    "relu2": _relu2,
}


def _remainder(e: Emitter, a: str, b: str) -> str:
    """ONNX has the C remainder for floats, whose sign is that of a; Python's is that of b."""
    rest = e.op("Mod", a, b, fmod=1)
    return e.op("Where", _apart(e, rest, b), e.op("Add", rest, b), rest)


def _apart(e: Emitter, rest: str, b: str) -> str:
    """A boolean: the remainder is not 0 and has not the sign of the divisor."""
    zero = e.const(0.0)
    other = e.op("Xor", e.op("Less", rest, zero), e.op("Less", b, zero))
    return e.op("And", e.op("Not", e.op("Equal", rest, zero)), other)


def _floor_divide(e: Emitter, a: str, b: str) -> str:
    """The quotient without the remainder is whole but for its rounding; by 0 it is that of floats."""
    rest = e.op("Mod", a, b, fmod=1)
    quotient = e.op("Div", e.op("Sub", a, rest), b)
    whole = e.op("Round", e.op("Sub", quotient, e.truth(_apart(e, rest, b))))
    return e.op("Where", e.op("Equal", b, e.const(0.0)), e.op("Div", a, b), whole)


def _whole_divide(e: Emitter, a: str, b: str) -> str:
    """Of integers, whose division in ONNX cuts towards 0."""
    rest = e.op("Mod", a, b)  # has the sign of b already
    return e.op("Div", e.op("Sub", a, rest), b)


BINARY: Mapping[str, Binary] = {
    "add": _two("Add"),
    "sub": _two("Sub"),
    "mul": _two("Mul"),
    "div": _two("Div"),
    "pow": _two("Pow"),
    "maximum": _two("Max"),
    "minimum": _two("Min"),
    "remainder": _remainder,
    "floor_divide": _floor_divide,
}
WHOLE_BINARY: Mapping[str, Binary] = {**BINARY, "remainder": _two("Mod"), "floor_divide": _whole_divide}
COMPARE: Mapping[str, Binary] = {
    "gt": _two("Greater"),
    "ge": _two("GreaterOrEqual"),
    "lt": _two("Less"),
    "le": _two("LessOrEqual"),
    "eq": _two("Equal"),
    "ne": lambda e, a, b: e.op("Not", e.op("Equal", a, b)),
}


def unary(e: Emitter, n: Node) -> Sequence[str]:
    table = UNARY if n.out.type.dtype == "f32" else WHOLE_UNARY
    return (table[n.op](e, e.value(n.inputs[0])),)


def gelu(e: Emitter, n: Node) -> Sequence[str]:
    return (ACTS["gelu_tanh" if n.attr("tanh") else "gelu"](e, e.value(n.inputs[0])),)


def act_mul(e: Emitter, n: Node) -> Sequence[str]:
    return (e.op("Mul", ACTS[str(n.attr("act"))](e, e.value(n.inputs[0])), e.value(n.inputs[1])),)


def binary(e: Emitter, n: Node) -> Sequence[str]:
    table = BINARY if n.out.type.dtype == "f32" else WHOLE_BINARY
    return (table[n.op](e, *_pair(e, n, n.out.type.dtype)),)


def compare(e: Emitter, n: Node) -> Sequence[str]:
    """A scalar meets integers as it is, a fraction too: in float64."""
    dtype = e.type(n.inputs[0]).dtype
    whole = dtype == "i32" and len(n.inputs) == 1
    a, b = _pair(e, n, "f32" if whole else dtype)
    if whole:
        a, b = e.double(a), e.double(b)
    return (e.truth(COMPARE[n.op](e, a, b)),)


def _pair(e: Emitter, n: Node, dtype: str) -> tuple[str, str]:
    values = [e.value(i) for i in n.inputs]
    if len(values) == 1:
        values.append(e.const(n.attr("scalar"), dtype))
    return (values[1], values[0]) if dict(n.attrs).get("reversed") else (values[0], values[1])


def where(e: Emitter, n: Node) -> Sequence[str]:
    c, a, b = (e.value(i) for i in n.inputs)
    return (e.op("Where", e.holds(c), a, b),)


def fused_chain(e: Emitter, n: Node) -> Sequence[str]:
    """The statements one by one."""
    values = {f"i{i}": e.value(name) for i, name in enumerate(n.inputs)}
    shapes = {f"i{i}": e.type(name).shape for i, name in enumerate(n.inputs)}
    last = ""
    for i, s in enumerate(fused.parse(str(n.attr("code")))):
        given = [values[a] if isinstance(a, str) else e.const(a) for a in s.args]
        last = f"t{i}"
        values[last] = _statement(e, s.op, given)
        shapes[last] = broadcast(*(shapes[a] if isinstance(a, str) else () for a in s.args))
    if shapes[last] != n.out.type.shape:  # an input that the result does not hang on gives it an axis
        shape = e.op("Shape", e.op("Sum", *(values[f"i{i}"] for i in range(len(n.inputs)))))
        return (e.op("Expand", values[last], shape),)
    return (values[last],)


def _statement(e: Emitter, op: str, given: Sequence[str]) -> str:
    if op == "where":
        return e.op("Where", e.holds(given[0]), *given[1:])
    if op in COMPARE:
        return e.truth(COMPARE[op](e, *given))
    return BINARY[op](e, *given) if op in BINARY else (UNARY.get(op) or ACTS[op])(e, *given)
