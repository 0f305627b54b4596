"""act_mul of the two halves of a product -> one op: gate and up never leave the cache that they are made in.

Half of what the product wrote is written, and none of it read again. Where a target has no kernel for both they stay.
"""

from planc.compiler.ir import gated
from planc.compiler.ir.graph import Graph, Node
from planc.passes.options import Options
from planc.passes.select import has_kernel
from planc.passes.util import readers


def fuse_gate(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Fuses each product whose halves are read by one act_mul alone, the gate being the first; counts them."""
    replaced: dict[Node, Node | None] = {}
    for act in [n for n in graph.nodes if n.op == "act_mul"]:
        product = _product(act, graph)
        if product is None:
            continue
        both = gated.joined(product, act)
        if has_kernel(both, graph, options):
            replaced |= {product: both, act: None} | {graph.producers[i]: None for i in act.inputs}
    return graph.rewrite(replaced), len(replaced) // 4


def apart(graph: Graph) -> Graph:
    """The graph with each gated product as the nodes that it stands for."""
    fused = [n for n in graph.nodes if n.op in gated.NAMES]
    return graph.rewrite({n: gated.parts(n) for n in fused}) if fused else graph


def _product(act: Node, graph: Graph) -> Node | None:
    gate, up = (graph.producers.get(i) for i in act.inputs)
    if gate is None or up is None or (gate.op, up.op) != ("slice", "slice") or gate.inputs != up.inputs:
        return None
    product = graph.producers.get(gate.inputs[0])
    if product is None or product.op not in gated.PRODUCTS or readers(graph, product.out.name) != 2:
        return None
    if any(readers(graph, half.out.name) != 1 for half in (gate, up)):
        return None
    last, columns = len(product.out.type.shape) - 1, int(product.out.type.shape[-1])
    wanted = [(last, 0, columns // 2), (last, columns // 2, columns)]
    return product if [_range(gate), _range(up)] == wanted else None


def _range(half: Node) -> tuple[object, ...]:
    return tuple(half.attr(name) for name in ("axis", "start", "stop"))
