"""CPU kernel rows of pointwise ops: unary, binary, comparisons, gated activations, casts, and fused chains."""

import hashlib
from collections.abc import Callable
from math import isinf, isnan

from planc.codegen.axes import Axes, elementwise
from planc.codegen.kernel import ANY_VIEW, Constant, Design, Row, Types, integer, real
from planc.compiler.ir.fused import Arg, Statement, parse
from planc.compiler.ir.graph import Node

_UNARY = {
    "neg": "Neg",
    "abs": "Abs",
    "exp": "Exp",
    "log": "Log",
    "sqrt": "Sqrt",
    "rsqrt": "Rsqrt",
    "reciprocal": "Reciprocal",
    "square": "Square",
    "cos": "Cos",
    "sin": "Sin",
    "tanh": "Tanh",
    "erf": "Erf",
    "sigmoid": "Sigmoid",
    "silu": "Silu",
    "relu": "Relu",
    "softplus": "Softplus",
    "floor": "Floor",
    "ceil": "Ceil",
    "trunc": "Trunc",
    "round": "Round",
    "sign": "Sign",
    "expm1": "Expm1",
    "log1p": "Log1p",
}
_COMPARE = {"gt": "Gt", "ge": "Ge", "lt": "Lt", "le": "Le", "eq": "Eq", "ne": "Ne"}
_BINARY = {
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
    "pow": "Pow",
    "maximum": "Maximum",
    "minimum": "Minimum",
    "remainder": "Remainder",
    "floor_divide": "FloorDivide",
    **_COMPARE,
}
_ON_INTS = ("neg", "abs", "square", "sign", *(op for op in _BINARY if op not in ("div", "pow")))
_ACTS = {
    "silu": "Silu",
    "relu": "Relu",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "gelu": "Gelu",
    "gelu_tanh": "GeluTanh",
    "relu2": "Relu2",
}
_IN_CHAINS = {**_UNARY, **_BINARY, "gelu": "Gelu", "gelu_tanh": "GeluTanh", "where": "Where"}
_CPP = {"f32": "float", "i32": "int32_t"}


def _pointwise(function: str, node: Node, types: Types, constants: tuple[Constant, ...] = ()) -> Design:
    """A design of pointwise.cpp.jinja: vectors when all is float32, one element at a time otherwise."""
    axes = elementwise(node.out.type, types)
    dtypes = [t.dtype for t in (*types, node.out.type)]
    floats = set(dtypes) == {"f32"}
    variables = pointwise_variables(function, axes) | {"walk": "Pointwise" if floats else "ScalarPointwise"}
    variables |= {"elements": [_CPP[d] for d in dtypes[:-1]], "out_element": _CPP[dtypes[-1]]}
    return Design(constants, variables, (*(() if floats else dtypes), axes.tag))


def pointwise_variables(function: str, axes: Axes) -> dict[str, object]:
    """Variables of pointwise.cpp.jinja for a function of float vectors."""
    made: dict[str, object] = {"function": function, "extent": axes.extent, "out": axes.out, "inputs": axes.inputs}
    made |= {"walk": "Pointwise", "elements": ["float"] * len(axes.inputs), "out_element": "float", "code": ()}
    return made


def _tagged(tag: str, design: Design) -> Design:
    return Design(design.constants, design.variables, (tag, *design.tags))


def _fits(node: Node, types: Types) -> bool:
    dtypes = {t.dtype for t in types}
    return dtypes == {"f32"} or (dtypes == {"i32"} and node.op in _ON_INTS and _whole(node))


def _whole(node: Node) -> bool:
    """Whether the scalar, if there is one, is exact as an int32."""
    scalar = float(node.attr("scalar", 0.0))  # type: ignore[arg-type]
    return scalar.is_integer() and -(2**31) <= scalar < 2**31


def _unary(node: Node, types: Types) -> Design:
    return _pointwise(f"planc::{_UNARY[node.op]}", node, types)


def _gelu(node: Node, types: Types) -> Design:
    tanh = bool(node.attr("tanh"))
    return _tagged("tanh" if tanh else "erf", _pointwise("planc::GeluTanh" if tanh else "planc::Gelu", node, types))


def _act_mul(node: Node, types: Types) -> Design:
    return _tagged(str(node.attr("act")), _pointwise(gated(node), node, types))


def gated(node: Node) -> str:
    """The function of an act_mul, or of one that rounds."""
    return f"planc::Gated<planc::{_ACTS[str(node.attr('act'))]}>"


def _binary(node: Node, types: Types) -> Design:
    if len(types) == 2:
        return _pointwise(f"planc::{_BINARY[node.op]}", node, types)
    scalar, swapped = float(node.attr("scalar")), bool(node.attr("reversed", False))  # type: ignore[arg-type]
    if _is_power(node.op, scalar) and not swapped:
        return _tagged(f"int{int(scalar)}", _pointwise(f"planc::PowInt<{int(scalar)}>", node, types))
    function = f"planc::WithConstant<planc::{_BINARY[node.op]}, Config, {str(swapped).lower()}>"
    value = integer("VALUE", int(scalar)) if types[0].dtype == "i32" else real("VALUE", scalar)
    return _tagged("reversed" if swapped else "", _pointwise(function, node, types, (value,)))


def _is_power(op: str, scalar: float) -> bool:
    """True for a power that a few products make."""
    return op == "pow" and scalar in (2.0, 3.0, 4.0)


def _where_fits(node: Node, types: Types) -> bool:
    return node.out.type.dtype in _CPP


def _where(node: Node, types: Types) -> Design:
    return _pointwise("planc::Where", node, types)


def _cast_fits(node: Node, types: Types) -> bool:
    return types[0].dtype in _CPP and node.attr("dtype") in _CPP


def _cast(node: Node, types: Types) -> Design:
    same = types[0].dtype == node.attr("dtype") == "f32"
    return _pointwise("planc::Copy" if same else "planc::Cast", node, types)


def _fused(node: Node, types: Types) -> Design:
    code = str(node.attr("code"))
    design = _pointwise("Chain", node, types)
    tag = hashlib.sha256(code.encode()).hexdigest()[:16]  # a name drops the signs that tell two codes apart
    return Design((), {**design.variables, "code": [_statement(s) for s in parse(code)]}, (tag, *design.tags))


def _statement(s: Statement) -> str:
    """A statement as a C++ expression over vectors."""
    if len(s.args) == 2 and isinstance(s.args[1], float) and _is_power(s.op, s.args[1]):
        return f"planc::PowInt<{int(s.args[1])}>::apply({s.args[0]})"
    return f"planc::{_IN_CHAINS[s.op]}::apply({', '.join(map(_argument, s.args))})"


def _argument(arg: Arg) -> str:
    if isinstance(arg, str):
        return arg
    if isnan(arg):
        return 'planc::splat(__builtin_nanf(""))'
    return f"planc::splat({('-' if arg < 0 else '') + '__builtin_inff()' if isinf(arg) else f'float({arg.hex()})'})"


_TEMPLATE = "pointwise.cpp.jinja"


def _row(
    op: str,
    design: Callable[[Node, Types], Design],
    dtypes: str = "f32",
    when: Callable[[Node, Types], bool] = _fits,
) -> Row:
    return Row(op, _TEMPLATE, design, dtypes, when, views=ANY_VIEW)


def _dtypes(op: str) -> str:
    return "f32 or i32" if op in _ON_INTS else "f32"


ELEMENTWISE: tuple[Row, ...] = (
    *(_row(op, _unary, _dtypes(op)) for op in _UNARY),
    *(_row(op, _binary, _dtypes(op)) for op in _BINARY),
    _row("gelu", _gelu),
    _row("act_mul", _act_mul),
    _row("fused", _fused),
    _row("where", _where, "a condition of f32, values of f32 or i32", _where_fits),
    _row("cast", _cast, "between f32 and i32", _cast_fits),
)
