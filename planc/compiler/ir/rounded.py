"""Ops that round the rows they make: in goes an op of the table, out comes it and quantize_rows as one op.

Inputs are those of the op, then the shift (where the attribute `shift` says so) and the outliers (i32, which nothing
else is) of quantize_rows; attributes are those of both. Outputs are the op's others, then codes and scales.
"""

from collections.abc import Callable, Mapping, Sequence

from planc.compiler.ir import operands, refs_quant
from planc.compiler.ir.graph import Node, Value
from planc.compiler.ir.refs import Array, Out, Ref
from planc.compiler.ir.types import Attr, TensorType

Attrs = Mapping[str, Attr]
Types = Sequence[TensorType]
Infer = Callable[[Attrs, Types], tuple[TensorType, ...]]

FIRST = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "act_mul")  # whose first output is like its input
ATTRS: Mapping[str, bool] = {"dtype": True, "hadamard": False, "group": False}  # of quantize_rows


def name(op: str) -> str:
    """The op that rounds what `op` makes."""
    return f"{op}_quantize"


NAMES = frozenset(map(name, FIRST))


def infer(made: Infer) -> Infer:
    """The type rule of an op that rounds what `made` is the rule of."""

    def both(attrs: Attrs, types: Types) -> tuple[TensorType, ...]:
        """Inputs of the op that makes the rows, then maybe a shift and outliers, give its other outputs, then codes and
        scales of the rows; see quantize_rows.
        """
        count = len(types) - _taken(attrs, types)
        rows, *others = made(attrs, types[:count])
        return (*others, *operands.rows_types(attrs, [rows, *types[count:]]))

    return both


def ref(made: Ref) -> Ref:
    """The reference of an op that rounds what `made` makes."""

    def both(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
        count = len(types) - _taken(attrs, types)
        rows, *others = made(attrs, args[:count], types[:count])
        return (*others, *refs_quant.quantize_rows(attrs, [rows, *args[count:]], [types[0], *types[count:]]))

    return both


def joined(first: Node, second: Node, types: Types) -> Node:
    """An op and the quantize_rows that reads its first output, of whose inputs `types` are, as one node."""
    _, shift, _ = operands.rounding(second.inputs, types)
    attrs = (*first.attrs, *second.attrs, *((("shift", True),) if shift is not None else ()))
    inputs = (*first.inputs, *second.inputs[1:])
    return Node(name(first.op), inputs, (*first.outputs[1:], *second.outputs), attrs, first.loc)


def pair(n: Node, types: Types) -> tuple[Node, Node]:
    """The op and the quantize_rows that a node stands for, of whose inputs `types` are."""
    count = len(types) - _taken(dict(n.attrs), types)
    *others, codes, _ = n.outputs
    attrs = tuple((k, v) for k, v in n.attrs if k in ATTRS)
    tail = operands.codes_tail(dict(attrs), n.inputs[count:])
    made = codes.name.removesuffix(tail) if codes.name.endswith(tail) else f"{codes.name}.rows"
    rows = Value(made, TensorType(types[0].dtype, types[0].shape))
    own = tuple((k, v) for k, v in n.attrs if k not in (*ATTRS, "shift"))
    op = n.op.removesuffix(name(""))
    return (
        Node(op, n.inputs[:count], (rows, *others), own, n.loc),
        Node("quantize_rows", (rows.name, *n.inputs[count:]), n.outputs[len(others) :], attrs, n.loc),
    )


def _taken(attrs: Attrs, types: Types) -> int:
    """How many of the last inputs are those of quantize_rows."""
    return bool(attrs.get("shift")) + (types[-1].dtype == "i32")
