"""CPU kernel rows of what rounds rows to 8 bits: as they lie, or where a norm or a gated activation makes them."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from planc.codegen.axes import outer
from planc.codegen.cpu_elementwise import gated
from planc.codegen.cpu_linear import ELEMENTS
from planc.codegen.cpu_model import norm, norm_fits
from planc.codegen.kernel import Constant, Design, Row, Types, alias, flag, integer, real
from planc.compiler.ir import hadamard, rounded
from planc.compiler.ir.graph import Node
from planc.compiler.ir.operands import rounding
from planc.compiler.ir.types import TensorType

_MOST = 1 << 16  # features of a row that a thread holds on its stack, maybe turned besides


def _quantize_rows(node: Node, types: Types) -> Design:
    constants, variables = _rounds(node, types, 0)
    axes = outer(TensorType("f32", types[0].shape), types[:1])
    given = {"extent": axes.extent, "out": axes.out, "x": axes.inputs[0], "rounding": variables}
    return Design(constants, given, (axes.tag,))


def _rounds(node: Node, types: Types, at: int) -> tuple[tuple[Constant, ...], Mapping[str, object]]:
    """Constants and variables of a quantize_rows; what it takes besides rows is behind input `at` of the kernel."""
    dtype = str(node.attr("dtype"))
    turned = int(node.attr("hadamard", 1))  # type: ignore[arg-type]
    _, shift, outliers = rounding(range(at, at + len(types)), types)
    constants = [alias("Element", ELEMENTS[dtype], dtype), integer("WIDTH", int(types[0].shape[-1]))]
    count = 0 if outliers is None else int(types[outliers - at].shape[0])
    if group := int(node.attr("group", 0)):  # type: ignore[arg-type]
        constants += [integer("GROUP", group)]
    constants += [integer("HADAMARD", turned), flag("SHIFT", shift is not None), integer("OUTLIERS", count)]
    if turned > 1:
        words = ", ".join(f"{word:#x}u" for word in hadamard.WORDS)
        constants += [Constant(f"static constexpr uint32_t WORD[{len(hadamard.WORDS)}] = {{{words}}}", "")]
        constants += [replace(real("SCALE", float(hadamard.scale(turned))), tag="")]
    return tuple(constants), {"shift": shift, "outliers": outliers, "to": at + len(types)}


def _both(first: Callable[[Node, Types], Design]) -> Callable[[Node, Types], Design]:
    """The design of an op that rounds what it makes, from that of the op which makes it."""

    def design(node: Node, types: Types) -> Design:
        made, second = rounded.pair(node, types)
        count = len(made.inputs)
        given = first(made, types[:count])
        constants, variables = _rounds(second, [made.out.type, *types[count:]], count - 1)
        behind = {"total": len(types), "rounding": {**variables, "to": len(types) + len(made.outputs) - 1}}
        return Design(tuple(dict.fromkeys((*given.constants, *constants))), {**given.variables, **behind}, given.tags)

    return design


def _gated(node: Node, types: Types) -> Design:
    axes = outer(node.out.type, types)
    given = {"extent": axes.extent, "out": axes.out, "inputs": axes.inputs, "function": gated(node)}
    return Design((), given, (str(node.attr("act")), axes.tag))


def _held(t: TensorType) -> bool:
    return int(t.shape[-1]) <= _MOST


def _fits(node: Node, types: Types) -> bool:
    count = len(rounded.pair(node, types)[0].inputs)
    return norm_fits(node, types[:count]) and _held(types[0])


_ROUND = "maybe a shift f32[K] and outliers i32[n], to i8 or f8e4m3, and a scale a row or group"
_MADE = f"f32 [T, .., K], K up to {_MOST}, and parameters; {_ROUND}"


def _row(op: str, views: int) -> Row:
    acts = op == "act_mul"
    template, first = ("act_mul_quantize.cpp.jinja", _gated) if acts else ("norm.cpp.jinja", norm)
    return Row(rounded.name(op), template, _both(first), _MADE, _fits, views=frozenset(range(views)))


QUANTIZE: tuple[Row, ...] = (
    Row("quantize_rows", "quantize_rows.cpp.jinja", _quantize_rows, f"x f32[.., K], {_ROUND}", views=frozenset({0})),
    *(_row(op, 1 if op in ("rms_norm", "layer_norm") else 2) for op in rounded.FIRST),
)
