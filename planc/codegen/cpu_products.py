"""CPU kernel rows of products of activations: matmul, weighted_sum."""

from planc.codegen.axes import outer
from planc.codegen.kernel import Design, Row, Types, integer
from planc.compiler.ir.graph import Node
from planc.compiler.ir.types import TensorType


def _matmul(node: Node, types: Types) -> Design:
    a, b = types
    n, k, strides = int(b.shape[-1]), int(a.shape[-1]), b.strides()
    # b without its k axis, which the kernel walks: the strides that reach a matrix
    matrix = TensorType(b.dtype, (*b.shape[:-2], 1, n), "strides:" + ",".join(str(s) for s in strides[:-1]))
    axes = outer(node.out.type, [a, matrix])
    variables = {"extent": axes.extent, "out": axes.out, "inputs": axes.inputs}
    return Design((integer("N", n), integer("K", k), integer("LDB", strides[-2])), variables, (axes.tag,))


def _matmul_fits(node: Node, types: Types) -> bool:
    return all(t.dtype == "f32" for t in types)


def _weighted_sum(node: Node, types: Types) -> Design:
    y, w = types
    row, slot, _ = y.strides()
    constants = (
        integer("SLOTS", int(y.shape[1])),
        integer("WIDTH", int(y.shape[2])),
        integer("Y_ROW", row),
        integer("Y_SLOT", slot),
        integer("W_ROW", w.strides()[0]),
    )
    return Design(constants)


_BOTH = frozenset({0, 1})

PRODUCTS: tuple[Row, ...] = (
    Row("matmul", "matmul.cpp.jinja", _matmul, "f32 [.., M, K] and [.., K, N]", _matmul_fits, views=_BOTH),
    Row("weighted_sum", "weighted_sum.cpp.jinja", _weighted_sum, "f32[T, k, N] and f32[T, k]", views=_BOTH),
)
