"""Products whose two halves are a gate and what passes it: in goes a product of the table, out comes act_mul of it as
one op.

Inputs are those of the product; attributes are those of both. The product's columns are the gate's, then the others.
"""

from collections.abc import Callable, Sequence

from planc.compiler.ir import refs
from planc.compiler.ir.graph import Node, Value
from planc.compiler.ir.refs import Array, Attrs, Out, Ref, Types
from planc.compiler.ir.types import TensorType

Infer = Callable[[Attrs, Types], tuple[TensorType, ...]]
PRODUCTS = ("linear", "qlinear")


def name(op: str) -> str:
    """The op that gates what `op` makes."""
    return f"{op}_act_mul"


NAMES = frozenset(map(name, PRODUCTS))


def infer(made: Infer) -> Infer:
    """The type rule of an op that gates what `made` is the rule of."""

    def both(attrs: Attrs, types: Types) -> tuple[TensorType, ...]:
        """Inputs of the product give act of the first half of its columns times the second half."""
        (wide,) = made(attrs, types)
        columns = int(wide.shape[-1])
        if columns % 2:
            raise ValueError(f"a gated product has two halves of columns, got {wide}")
        return (TensorType(wide.dtype, (*wide.shape[:-1], columns // 2)),)

    return both


def ref(made: Ref) -> Ref:
    """The reference of an op that gates what `made` makes."""

    def both(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
        (wide,) = made(attrs, args, types)
        half = wide.shape[-1] // 2
        return refs.act_mul(attrs, (wide[..., :half], wide[..., half:]), ())

    return both


def joined(product: Node, act: Node) -> Node:
    """A product and the act_mul of its halves as one node."""
    return Node(name(product.op), product.inputs, act.outputs, (*product.attrs, *act.attrs), product.loc)


def parts(n: Node) -> list[Node]:
    """The product, its halves and the act_mul that a node stands for."""
    t = n.out.type
    columns = int(t.shape[-1])
    wide = TensorType(t.dtype, (*t.shape[:-1], 2 * columns))
    own, act = tuple(a for a in n.attrs if a[0] != "act"), (("act", n.attr("act")),)
    product = Node(n.op.removesuffix("_act_mul"), n.inputs, (Value(f"{n.out.name}.halves", wide),), own, n.loc)
    halves = [_half(product, side, start, columns) for side, start in (("gate", 0), ("up", columns))]
    return [product, *halves, Node("act_mul", tuple(h.out.name for h in halves), n.outputs, act, n.loc)]


def _half(product: Node, side: str, start: int, columns: int) -> Node:
    from planc.compiler.ir.ops import OPS  # the table needs this module

    attrs = {"axis": len(product.out.type.shape) - 1, "start": start, "stop": start + columns}
    (view,) = OPS["slice"].infer(attrs, [product.out.type])
    out = Value(f"{product.out.name}.{side}", view)
    return Node("slice", (product.out.name,), (out,), tuple(attrs.items()), product.loc)
