"""act(gate) * up -> act_mul(gate, up): the gated activation of an MLP is one op over two halves."""

from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.refs import ACTS
from planc.passes.options import Options
from planc.passes.util import readers


def fuse_act(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Fuses each gated activation; counts them."""
    replaced: dict[Node, Node | None] = {}
    for mul in gated(graph):
        act, up = _parts(mul, graph)
        replaced[mul] = Node("act_mul", (act.inputs[0], up), mul.outputs, (("act", _act(act)),), mul.loc)
    return graph.rewrite(replaced), len(replaced)


def gated(graph: Graph) -> list[Node]:
    """Products of an activation, read by nothing else, and a value of the same shape: each must be fused."""
    return [n for n in graph.nodes if n.op == "mul" and len(n.inputs) == 2 and _find(n, graph)]


def _act(n: Node) -> str:
    if n.op == "gelu":
        return "gelu_tanh" if n.attr("tanh", False) else "gelu"
    return n.op if n.op in ACTS else ""


def _find(mul: Node, graph: Graph) -> tuple[Node, str] | None:
    for i, name in enumerate(mul.inputs):
        act, up = graph.producers.get(name), mul.inputs[1 - i]
        if act is None or not _act(act) or readers(graph, name) != 1:
            continue
        if up not in graph.weight_by_name and graph.types[up].shape == mul.out.type.shape == act.out.type.shape:
            return act, up
    return None


def _parts(mul: Node, graph: Graph) -> tuple[Node, str]:
    found = _find(mul, graph)
    assert found is not None
    return found
