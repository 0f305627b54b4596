"""CPU kernel rows of ops that only move elements of four bytes: copy, expand, transpose, concat, rows by index."""

from planc.codegen.axes import elementwise, strided
from planc.codegen.cpu_elementwise import pointwise_variables
from planc.codegen.kernel import ANY_VIEW, Design, Row, Types
from planc.compiler.ir.graph import Node
from planc.compiler.ir.types import TensorType

_WORDS = ("f32", "i32")  # a float register moves the bits of either


def _fits(node: Node, types: Types) -> bool:
    return node.out.type.dtype in _WORDS


def _copy(node: Node, types: Types) -> Design:
    axes = elementwise(node.out.type, types)
    return Design((), pointwise_variables("planc::Copy", axes), (axes.tag,))


def _transpose(node: Node, types: Types) -> Design:
    perm, strides, out = node.attr("perm"), types[0].strides(), node.out.type
    assert isinstance(perm, tuple)
    axes = strided([int(d) for d in out.shape[1:]], out.strides(), [strides[p] for p in perm])
    return Design((), pointwise_variables("planc::Copy", axes), (axes.tag,))


def _concat(node: Node, types: Types) -> Design:
    """Parts beside each other in every row, or below each other when the first axis has a known length."""
    axis, strides = node.attr("axis"), node.out.type.strides()
    assert isinstance(axis, int)
    at, parts, tags = 0, [], []
    for t in types:
        axes, offset = strided([int(d) for d in t.shape[1:]], strides, t.strides()), at * strides[axis]
        rows = "rows" if axis else str(t.shape[0])
        parts.append({"extent": axes.extent, "out": axes.out, "inputs": axes.inputs, "offset": offset, "rows": rows})
        tags.append(f"at{offset}_{axes.tag}" + ("" if axis else f"_rows{rows}"))
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


_SAYS = "f32 or i32"
_TEMPLATE = "pointwise.cpp.jinja"

MOVES: tuple[Row, ...] = (
    Row("copy", _TEMPLATE, _copy, _SAYS, _fits, views=ANY_VIEW),
    Row("expand", _TEMPLATE, _copy, _SAYS, _fits, views=ANY_VIEW),
    Row("transpose", _TEMPLATE, _transpose, _SAYS, _fits, views=ANY_VIEW),
    Row("concat", "concat.cpp.jinja", _concat, _SAYS, _fits, views=ANY_VIEW),
    Row(
        "take_rows",
        "take_rows.cpp.jinja",
        _take_rows,
        "x[T, ..] with dense rows, index i32[R]",
        _take_rows_fits,
        views=frozenset({0}),
    ),
)
