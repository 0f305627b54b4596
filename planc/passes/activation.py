"""0.5 x (1 + tanh(...)) -> gelu(x): an elementwise region of one source that computes a known activation becomes it.

Found by what it computes, not by how it is spelt: the region is evaluated on a grid and compared with each activation.
"""

from collections.abc import Iterator

import numpy as np

from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.interp import Env, execute
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.refs import ACTS, BINARY, UNARY
from planc.compiler.ir.types import Attr
from planc.passes.options import Options
from planc.passes.util import readers

# Activations with an op of their own: ACTS name -> op and attributes. relu2 is spelt by two ops and needs none.
_AS_OP: dict[str, tuple[str, tuple[tuple[str, Attr], ...]]] = {
    "silu": ("silu", ()),
    "gelu": ("gelu", (("tanh", False),)),
    "gelu_tanh": ("gelu", (("tanh", True),)),
    "sigmoid": ("sigmoid", ()),
}
_FAR = np.array([10, 12, 20, 50, 88, 100, 1e3, 1e4, np.inf], np.float32)  # where a clamp would show
_GRID = np.concatenate([np.linspace(-9, 9, 721, dtype=np.float32), _FAR, -_FAR[:-1]])
_POINTWISE = {*UNARY, *BINARY}


def activation(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Replaces each such region by one op; counts the regions."""
    replaced: dict[Node, Node | None] = {}
    taken: set[str] = set()
    for n in reversed(graph.nodes):
        if n.op not in _POINTWISE or n.out.name in taken:
            continue
        found = _match(n, graph)
        if found:
            source, name, region = found
            op, attrs = _AS_OP[name]
            replaced[n] = Node(op, (source,), n.outputs, attrs, n.loc)
            taken |= region
    return graph.rewrite(replaced), len(replaced)


def _match(n: Node, graph: Graph) -> tuple[str, str, set[str]] | None:
    """The source, the activation's name and the region of more than one node that ends in `n`."""
    best = None
    for source, region in _regions(n, graph):
        name = _name_of(region, source, graph) if len(region) > 1 else None
        if name:
            best = (source, name, {r.out.name for r in region})
    return best


def _regions(n: Node, graph: Graph) -> Iterator[tuple[str, list[Node]]]:
    """Every value that all of `n` is computed from, elementwise, with the nodes between; nearest first."""
    index = graph.order
    frontier = {n.out.name}
    region: list[Node] = []
    while True:
        last = max(frontier, key=lambda name: index[name])
        node = graph.producers.get(last)
        if node is None or node.op not in _POINTWISE or len(region) > 16:
            return
        if region and readers(graph, last) > sum(last in r.inputs for r in region):
            return  # read outside of the region, so the region cannot swallow it
        region.append(node)
        frontier = (frontier - {last}) | set(node.inputs)
        if len(frontier) == 1:
            (source,) = frontier
            yield source, region[::-1]


def _name_of(region: list[Node], source: str, graph: Graph) -> str | None:
    env: Env = {source: _GRID}
    with np.errstate(all="ignore"):
        for r in region:
            execute(r, env, graph)
    result = env[region[-1].out.name]
    for name in _AS_OP:
        if np.allclose(result, ACTS[name](_GRID), rtol=1e-5, atol=1e-6, equal_nan=True):
            return name
    return None


assert all(op in OPS for op, _ in _AS_OP.values())
