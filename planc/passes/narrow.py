"""What products and attention round to bf16 as they read it is written in bf16, on a GPU: bit for bit the same results
from half the bytes, and rows that go to the tensor cores as they lie in memory.
"""

from planc.codegen.work import PRODUCTS, first_weight
from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.ops import NARROWING, OPS
from planc.compiler.ir.quant import scheme
from planc.passes.options import Options


def narrow(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Gives each node whose first result is only read rounded the attribute `out`; counts them."""
    if options.target.kind != "cuda":
        return graph, 0
    made = [
        n for n in graph.nodes if n.op in NARROWING and n.out.type.dtype == "f32" and _is_rounded(n.out.name, graph)
    ]
    replaced = {n: n.with_attrs(out="bf16") for n in made}
    return (graph.rewrite(dict(replaced)).retyped() if made else graph), len(made)


def widened(graph: Graph) -> Graph:
    """The graph with every result as it was before `narrow`."""
    if not any("out" in dict(n.attrs) for n in graph.nodes if n.op in NARROWING):
        return graph
    return graph.map_nodes(_wide).retyped()


def _wide(n: Node) -> Node:
    if n.op not in NARROWING:
        return n
    return Node(n.op, n.inputs, n.outputs, tuple((k, v) for k, v in n.attrs if k != "out"), n.loc)


def _is_rounded(name: str, graph: Graph) -> bool:
    """Whether everything that reads a value rounds it to bf16 first."""
    return name not in graph.outputs and all(_rounds(n, name, graph) for n in graph.users[name])


def _rounds(n: Node, name: str, graph: Graph) -> bool:
    if n.inputs[0] != name or n.inputs.count(name) > 1:
        return False
    if n.op == "take_rows" or OPS[n.op].view:
        return _is_rounded(n.out.name, graph)
    if n.op == "paged_attention":
        return n.attr("dtype") != "f32"
    if n.op not in PRODUCTS:
        return False
    if "scheme" in dict(n.attrs):
        return scheme(str(n.attr("scheme"))).act is None
    return graph.types[n.inputs[first_weight(n)]].dtype == "bf16"
