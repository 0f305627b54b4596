"""norm(x) or act(gate) * up, then quantize_rows -> one op: what makes rows rounds them, too.

A launch less for each, and the rows are never written and read again. Where a target has no kernel for both, as where a
program of a GPU cannot hold a row, they stay two.
"""

from dataclasses import replace

from planc.compiler.ir import rounded
from planc.compiler.ir.graph import Graph, Node
from planc.passes.options import Options
from planc.passes.select import has_kernel
from planc.passes.util import readers


def fuse_quantize(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Fuses each rounding of rows that nothing else reads with what makes them; counts them."""
    replaced: dict[Node, Node | None] = {}
    for second in [n for n in graph.nodes if n.op == "quantize_rows"]:
        first = _first(second, graph)
        if first is None:
            continue
        both = rounded.joined(first, second, [graph.types[i] for i in second.inputs])
        if has_kernel(both, graph, options):
            replaced |= {first: both, second: None}
    return graph.rewrite(replaced), len(replaced) // 2


def apart(graph: Graph) -> Graph:
    """The graph with each op that rounds what it makes as the two that it stands for."""
    fused = [n for n in graph.nodes if n.op in rounded.NAMES]
    return graph.rewrite({n: _apart(n, graph) for n in fused}) if fused else graph


def _first(second: Node, graph: Graph) -> Node | None:
    """What makes the rows, if only `second` reads them; what else that takes is there before."""
    rows, *taken = second.inputs
    first = graph.producers.get(rows)
    if first is None or first.op not in rounded.FIRST or first.out.name != rows or readers(graph, rows) != 1:
        return None
    return first if all(name in graph.weight_by_name for name in taken) else None


def _apart(n: Node, graph: Graph) -> list[Node]:
    first, second = rounded.pair(n, [graph.types[i] for i in n.inputs])
    readers = graph.users[second.out.name]
    return [first, replace(second, loc=readers[0].loc if readers else n.loc)]
