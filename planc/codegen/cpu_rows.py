"""CPU kernel rows of ops along the last axis: reductions, softmax, running sums, topk, gather and scatter."""

from planc.codegen.axes import Axes, outer
from planc.codegen.kernel import ANY_VIEW, Design, Row, Types, flag, real
from planc.compiler.ir.graph import Node

_REDUCTIONS = {"sum": "Sum", "mean": "Mean", "amax": "Amax", "amin": "Amin", "prod": "Prod", "argmax": "Argmax"}
_MAPS = {"softmax": "Softmax", "cumsum": "CumSum"}
_CPP = {"f32": "float", "i32": "int32_t"}


def _fits(node: Node, types: Types) -> bool:
    return types[0].dtype == "f32"


def _last(axis_of: Types, index: int = 0) -> int:
    return int(axis_of[index].shape[-1])


def _walk(axes: Axes) -> dict[str, object]:
    return {"extent": axes.extent, "out": axes.out, "inputs": axes.inputs}


def _reduce(node: Node, types: Types) -> Design:
    axes, width = outer(node.out.type, types), _last(types)
    function, walk = _REDUCTIONS.get(node.op), "reduce_rows"
    if function is None:
        function, walk = _MAPS[node.op], "map_rows"
    variables = _walk(axes) | {"width": width, "function": function, "walk": walk}
    return Design((), variables | {"out_element": _CPP[node.out.type.dtype]}, (f"width{width}", axes.tag))


def _topk(node: Node, types: Types) -> Design:
    axes, width, count = outer(node.out.type, types), _last(types), int(node.attr("k"))  # type: ignore[arg-type]
    largest = "true" if node.attr("largest") else "false"
    variables = _walk(axes) | {"width": width, "count": count, "largest": largest}
    return Design(
        (), variables, (f"k{count}", "largest" if node.attr("largest") else "smallest", f"width{width}", axes.tag)
    )


def _gather_fits(node: Node, types: Types) -> bool:
    return types[0].dtype in _CPP


def _gather(node: Node, types: Types) -> Design:
    axes, width, count, dtype = outer(node.out.type, types), _last(types), _last(types, 1), types[0].dtype
    variables = _walk(axes) | {"width": width, "count": count, "element": _CPP[dtype]}
    return Design((), variables, (dtype, f"width{width}", f"count{count}", axes.tag))


def _scatter(node: Node, types: Types) -> Design:
    axes, width, count, add = outer(node.out.type, types), _last(types), _last(types, 1), bool(node.attr("add", False))
    stride = 0 if _last(types, -1) == 1 else 1
    variables = _walk(axes) | {"width": width, "count": count, "source_stride": stride}
    value = () if len(types) == 3 else (real("VALUE", float(node.attr("scalar"))),)  # type: ignore[arg-type]
    tags = (f"width{width}", f"count{count}", f"step{stride}", axes.tag)
    return Design((flag("ADD", add), *value), variables, tags)


_SAYS = "f32 [T, .., D]"

ROWS: tuple[Row, ...] = (
    *(Row(op, "reduce.cpp.jinja", _reduce, _SAYS, _fits, views=ANY_VIEW) for op in (*_REDUCTIONS, *_MAPS)),
    Row("topk", "topk.cpp.jinja", _topk, _SAYS, _fits, views=ANY_VIEW),
    Row("gather", "gather.cpp.jinja", _gather, f"{_SAYS}, or i32; an index of i32", _gather_fits, views=ANY_VIEW),
    Row("scatter", "scatter.cpp.jinja", _scatter, f"{_SAYS}; an index of i32", _fits, views=ANY_VIEW),
)
