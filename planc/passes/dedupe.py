"""op(x), op(x) -> op(x) once: equal nodes without effects become one, and weights of equal recipes too."""

from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.ops import OPS
from planc.passes.options import Options


def dedupe(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Keeps the first of each set of equal nodes; counts the others."""
    rename: dict[str, str] = {}
    kept_weights: dict[object, str] = {}
    for w in graph.weights:
        first = kept_weights.setdefault(w.recipe, w.name)
        if first != w.name:
            rename[w.name] = first
    kept: dict[object, Node] = {}
    dropped: dict[Node, None] = {}
    for n in graph.nodes:
        inputs = tuple(rename.get(i, i) for i in n.inputs)
        if OPS[n.op].effect:
            continue
        first_node = kept.setdefault((n.op, inputs, n.attrs), n)
        if first_node is not n:
            dropped[n] = None
            rename |= {v.name: k.name for v, k in zip(n.outputs, first_node.outputs, strict=True)}
    return graph.rewrite(dropped, rename=rename), len(dropped)
