"""CPU kernel rows of collectives, which join the ranks of a plan over shared memory."""

from math import prod

from planc.codegen.kernel import Design, Row, Types
from planc.compiler.ir.graph import Node


def _fits(node: Node, types: Types) -> bool:
    return types[0].dtype == "f32" and isinstance(types[0].shape[0], str)


def _reduce(node: Node, types: Types) -> Design:
    width = types[0].features
    return Design((), {"width": width}, (f"width{width}",))


def _gather(node: Node, types: Types) -> Design:
    starts, total = node.attr("starts"), node.attr("size")
    assert isinstance(starts, tuple)
    outer, width = prod(int(d) for d in types[0].shape[1:-1]), int(types[0].shape[-1])
    variables = {"outer": outer, "width": width, "total": total, "starts": starts}
    return Design((), variables, (f"outer{outer}", f"width{width}", f"of{total}", "at", *map(str, starts)))


_SAYS = "f32 [T, .., D]"

COLLECTIVE: tuple[Row, ...] = (
    Row("all_reduce", "all_reduce.cpp.jinja", _reduce, _SAYS, _fits),
    Row("all_gather", "all_gather.cpp.jinja", _gather, _SAYS, _fits),
)
