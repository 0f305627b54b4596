"""CPU kernel rows of products of two activations and of experts: matmul, expert_linear, weighted_sum."""

from planc.codegen.axes import outer
from planc.codegen.cpu_model import FORMATS
from planc.codegen.kernel import Design, Row, Types, alias, flag, integer
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


def _expert_fits(node: Node, types: Types) -> bool:
    w = types[2]
    return types[0].dtype == "f32" and w.dtype in FORMATS and (w.dtype == "i8") == (node.op == "qexpert_linear")


def _expert_linear(node: Node, types: Types) -> Design:
    x, ids, w = types[:3]
    experts, n, k = (int(d) for d in w.shape)
    scaled, bias = node.op == "qexpert_linear", bool(node.attr("bias", False))
    constants = (
        alias("Format", f"planc::{FORMATS[w.dtype]}", w.dtype),
        integer("EXPERTS", experts),
        integer("N", n),
        integer("K", k),
        integer("SLOTS", int(ids.shape[-1])),
        integer("X_ROW", x.strides()[0]),
        integer("X_SLOT", x.strides()[1] if len(x.shape) == 3 else 0),
        integer("IDS_ROW", ids.strides()[0] if len(ids.shape) == 2 else 0),
        flag("BIAS", bias),
    )
    return Design(constants, {"scaled": scaled, "bias": bias})


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


def _expert_row(op: str, weights: str) -> Row:
    says = f"x f32[T, K] or [T, k, K], ids i32[T, k] or [k], W {weights} packed, bias f32"
    views, packed = frozenset({0, 1}), frozenset({2})
    return Row(op, "expert_linear.cpp.jinja", _expert_linear, says, _expert_fits, packed=packed, views=views)


_BOTH = frozenset({0, 1})

PRODUCTS: tuple[Row, ...] = (
    Row("matmul", "matmul.cpp.jinja", _matmul, "f32 [.., M, K] and [.., K, N]", _matmul_fits, views=_BOTH),
    _expert_row("expert_linear", "f32 or bf16"),
    _expert_row("qexpert_linear", "i8 with f32 scales"),
    Row("weighted_sum", "weighted_sum.cpp.jinja", _weighted_sum, "f32[T, k, N] and f32[T, k]", views=_BOTH),
)
