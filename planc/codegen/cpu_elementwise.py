"""CPU kernel rows of elementwise ops, reductions over the last axis, and ops that only move data."""

from planc.codegen.axes import Axes, elementwise, fits, outer, strided
from planc.codegen.kernel import Constant, Design, Row, Types, integer, real
from planc.compiler.ir.graph import Node
from planc.compiler.ir.types import TensorType

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
    "copy": "Copy",
}
_BINARY = {
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
    "pow": "Pow",
    "maximum": "Maximum",
    "minimum": "Minimum",
}
_ON_INTS = ("add", "sub", "mul", "maximum", "minimum")
_REDUCTIONS = {"sum": "Sum", "mean": "Mean", "amax": "Amax"}
_ACTS = {
    "silu": "Silu",
    "relu": "Relu",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "gelu": "Gelu",
    "gelu_tanh": "GeluTanh",
    "relu2": "Relu2",
}
_CPP = {"f32": "float", "i32": "int32_t"}


def _pointwise(
    function: str, axes: Axes, constants: tuple[Constant, ...] = (), dtypes: tuple[str, str] = ("f32", "f32")
) -> Design:
    """A design of pointwise.cpp.jinja; `dtypes` are those of the inputs and of the output."""
    floats = dtypes == ("f32", "f32")
    walk = "Pointwise" if floats else "ScalarPointwise"
    variables = {"function": function, "extent": axes.extent, "out": axes.out, "inputs": axes.inputs, "walk": walk}
    variables |= {"in_element": _CPP[dtypes[0]], "out_element": _CPP[dtypes[1]]}
    return Design(constants, variables, (*(() if floats else dtypes), axes.tag))


def _f32(node: Node, types: Types) -> bool:
    return all(t.dtype == "f32" for t in types) and fits(node.out.type, types)


def _unary(node: Node, types: Types) -> Design:
    return _pointwise(f"planc::{_UNARY[node.op]}", elementwise(node.out.type, types))


def _gelu(node: Node, types: Types) -> Design:
    tanh = bool(node.attr("tanh"))
    design = _pointwise("planc::GeluTanh" if tanh else "planc::Gelu", elementwise(node.out.type, types))
    return Design(design.constants, design.variables, ("tanh" if tanh else "erf", *design.tags))


def _act_mul(node: Node, types: Types) -> Design:
    act = str(node.attr("act"))
    design = _pointwise(f"planc::Gated<planc::{_ACTS[act]}>", elementwise(node.out.type, types))
    return Design(design.constants, design.variables, (act, *design.tags))


def _binary_fits(node: Node, types: Types) -> bool:
    ints = all(t.dtype == "i32" for t in types) and node.op in _ON_INTS and _whole(node)
    return (ints or all(t.dtype == "f32" for t in types)) and fits(node.out.type, types)


def _whole(node: Node) -> bool:
    """Whether the scalar, if there is one, is exact as an int32."""
    scalar = float(node.attr("scalar", 0.0))  # type: ignore[arg-type]
    return scalar.is_integer() and -(2**31) <= scalar < 2**31


def _binary(node: Node, types: Types) -> Design:
    dtypes = (types[0].dtype, types[0].dtype)
    axes = elementwise(node.out.type, types)
    if len(types) == 2:
        return _pointwise(f"planc::{_BINARY[node.op]}", axes, dtypes=dtypes)
    scalar, swapped = float(node.attr("scalar")), bool(node.attr("reversed", False))  # type: ignore[arg-type]
    if node.op == "pow" and not swapped and scalar in (2.0, 3.0, 4.0):
        design = _pointwise(f"planc::PowInt<{int(scalar)}>", axes)
        return Design((), design.variables, (f"int{int(scalar)}", *design.tags))
    function = f"planc::WithConstant<planc::{_BINARY[node.op]}, Config, {str(swapped).lower()}>"
    value = integer("VALUE", int(scalar)) if dtypes[0] == "i32" else real("VALUE", scalar)
    design = _pointwise(function, axes, (value,), dtypes)
    return Design(design.constants, design.variables, ("reversed" if swapped else "", *design.tags))


def _cast_fits(node: Node, types: Types) -> bool:
    return types[0].dtype in _CPP and node.attr("dtype") in _CPP and fits(node.out.type, types)


def _cast(node: Node, types: Types) -> Design:
    dtypes = (types[0].dtype, str(node.attr("dtype")))
    axes = elementwise(node.out.type, types)
    return _pointwise("planc::Copy" if dtypes == ("f32", "f32") else "planc::Cast", axes, dtypes=dtypes)


def _reduce_fits(node: Node, types: Types) -> bool:
    return types[0].dtype == "f32" and len(types[0].shape) in (2, 3, 4)


def _reduce(node: Node, types: Types) -> Design:
    axes, width = outer(node.out.type, types), int(types[0].shape[-1])
    variables = {"extent": axes.extent, "out": axes.out, "inputs": axes.inputs, "width": width}
    return Design((), variables | {"reduction": _REDUCTIONS[node.op]}, (f"width{width}", axes.tag))


def _permuted(node: Node, types: Types) -> Axes:
    perm, x, out = node.attr("perm"), types[0], node.out.type
    assert isinstance(perm, tuple)
    strides = x.strides()
    return strided([int(d) for d in out.shape[1:]], out.strides(), [strides[p] for p in perm])


def _transpose_fits(node: Node, types: Types) -> bool:
    perm = node.attr("perm")
    return types[0].dtype == "f32" and isinstance(perm, tuple) and perm[0] == 0 and len(perm) <= 4


def _transpose(node: Node, types: Types) -> Design:
    return _pointwise("planc::Copy", _permuted(node, types))


def _concat_fits(node: Node, types: Types) -> bool:
    return node.attr("axis") != 0 and all(t.dtype == "f32" for t in types) and len(types[0].shape) <= 4


def _concat(node: Node, types: Types) -> Design:
    axis = node.attr("axis")
    assert isinstance(axis, int)
    strides, at, parts, tags = node.out.type.strides(), 0, [], []
    for t in types:
        axes = strided([int(d) for d in t.shape[1:]], strides, t.strides())
        parts.append({"extent": axes.extent, "out": axes.out, "inputs": axes.inputs, "offset": at * strides[axis]})
        tags.append(f"at{at * strides[axis]}_{axes.tag}")
        at += int(t.shape[axis])
    return Design((), {"parts": parts}, tuple(tags))


def _take_rows_fits(node: Node, types: Types) -> bool:
    x = types[0]
    dense = TensorType(x.dtype, x.shape).strides()
    return types[1].dtype == "i32" and x.strides()[1:] == dense[1:]


def _take_rows(node: Node, types: Types) -> Design:
    x = types[0]
    row, stride = x.features * x.itemsize, x.strides()[0] * x.itemsize
    return Design((), {"row_bytes": row, "x_stride_bytes": stride}, (f"bytes{row}", f"xstride{stride}"))


_ANY_VIEW = frozenset(range(64))
_POINTWISE = "pointwise.cpp.jinja"

ELEMENTWISE: tuple[Row, ...] = (
    *(Row(op, _POINTWISE, _unary, "f32 of up to 3 feature axes", _f32, views=_ANY_VIEW) for op in _UNARY),
    *(
        Row(
            op,
            _POINTWISE,
            _binary,
            "f32" + (" or i32" if op in _ON_INTS else "") + ", up to 3 feature axes",
            _binary_fits,
            views=_ANY_VIEW,
        )
        for op in _BINARY
    ),
    *(
        Row(op, "reduce.cpp.jinja", _reduce, "f32 [T, .., D] of up to 4 axes", _reduce_fits, views=_ANY_VIEW)
        for op in _REDUCTIONS
    ),
    Row("gelu", _POINTWISE, _gelu, "f32 of up to 3 feature axes", _f32, views=_ANY_VIEW),
    Row("act_mul", _POINTWISE, _act_mul, "f32 of up to 3 feature axes", _f32, views=_ANY_VIEW),
    Row("cast", _POINTWISE, _cast, "between f32 and i32", _cast_fits, views=_ANY_VIEW),
    Row(
        "transpose", _POINTWISE, _transpose, "f32 of up to 4 axes, the first one kept", _transpose_fits, views=_ANY_VIEW
    ),
    Row(
        "concat", "concat.cpp.jinja", _concat, "f32 of up to 4 axes, not along the first", _concat_fits, views=_ANY_VIEW
    ),
    Row(
        "take_rows",
        "take_rows.cpp.jinja",
        _take_rows,
        "x[T, ..] with dense rows, index i32[R]",
        _take_rows_fits,
        views=frozenset({0}),
    ),
)
