"""norm(x + y) -> (norm, x + y) in one op: the sum stays live as the second output, it is the residual."""

from planc.compiler.ir.graph import Graph, Node
from planc.passes.options import Options

_FUSED = {"rms_norm": "add_rms_norm", "layer_norm": "add_layer_norm"}


def fuse_add_norm(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Fuses the first norm after each sum; counts the norms fused."""
    replaced: dict[Node, Node | None] = {}
    for norm in fusable(graph):
        add = graph.producers[norm.inputs[0]]
        outputs = (*norm.outputs, *add.outputs)
        replaced[add] = Node(_FUSED[norm.op], (*add.inputs, *norm.inputs[1:]), outputs, norm.attrs, norm.loc)
        replaced[norm] = None
    return graph.rewrite(replaced), len(replaced) // 2


def fusable(graph: Graph) -> list[Node]:
    """Norms of a sum of two values of one shape, the first of each sum: each must be fused."""
    first: dict[str, Node] = {}
    for n in graph.nodes:
        add = graph.producers.get(n.inputs[0]) if n.op in _FUSED else None
        if add is not None and add.op == "add" and _same_shape(add, graph):
            first.setdefault(add.out.name, n)
    return list(first.values())


def _same_shape(add: Node, graph: Graph) -> bool:
    return len(add.inputs) == 2 and graph.types[add.inputs[0]].shape == graph.types[add.inputs[1]].shape
