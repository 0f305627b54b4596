"""tanh(x / 30) * 30 -> fused(x): pointwise ops that feed each other become one loop, which reads and writes once.

A chain has one result; what it computes on the way has the same shape and no reader outside. What earlier passes know
by name (norms, gated activations, rotations) is no longer here to be taken.
"""

from collections.abc import Iterable

from planc.compiler.ir.fused import Arg, Statement, render
from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.refs import BINARY, COMPARE, UNARY
from planc.passes.options import Options
from planc.passes.util import readers

_POINTWISE = {*UNARY, *BINARY, *COMPARE, "where", "gelu"}
_MAX_STATEMENTS = 24
_MAX_INPUTS = 8


def fuse_pointwise(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Fuses each chain of two nodes or more; counts the chains."""
    taken: set[str] = set()
    replaced: dict[Node, Node | None] = {}
    for end in reversed(graph.nodes):
        if not _is_pointwise(end, graph) or end.out.name in taken:
            continue
        chain = _chain(end, graph)
        taken |= {n.out.name for n in chain}
        if len(chain) > 1:
            replaced |= dict.fromkeys(chain[:-1]) | {end: _fused(chain, graph)}
    return graph.rewrite(replaced), sum(n is not None for n in replaced.values())


def _is_pointwise(n: Node, graph: Graph) -> bool:
    """True for a node that a chain may hold: float32 throughout."""
    return n.op in _POINTWISE and all(graph.types[name].dtype == "f32" for name in (*n.inputs, n.out.name))


def _chain(end: Node, graph: Graph) -> list[Node]:
    """Nodes that only `end` needs, in order, `end` last."""
    index, chain = graph.order, {end.out.name: end}
    refused: set[str] = set()
    while len(chain) < _MAX_STATEMENTS:
        open_ = [i for i in _inputs(chain.values()) if i not in refused and _may_join(i, chain, graph)]
        if not open_:
            break
        name = max(open_, key=lambda i: index[i])  # the latest first: all of its readers are decided on
        wider = chain | {name: graph.producers[name]}
        if len(_inputs(wider.values())) > _MAX_INPUTS:
            refused.add(name)
        else:
            chain = wider
    return sorted(chain.values(), key=lambda n: index[n.out.name])


def _inputs(chain: Iterable[Node]) -> list[str]:
    """What the nodes of a chain read from outside of it, each once, in order of first use."""
    nodes = list(chain)
    made = {n.out.name for n in nodes}
    return [i for i in dict.fromkeys(i for n in nodes for i in n.inputs) if i not in made]


def _may_join(name: str, chain: dict[str, Node], graph: Graph) -> bool:
    n = graph.producers.get(name)
    if n is None or not _is_pointwise(n, graph):
        return False
    end = next(iter(chain.values()))
    inside = sum(u.out.name in chain for u in graph.users[name] if u.outputs)
    return n.out.type.shape == end.out.type.shape and readers(graph, name) == inside


def _fused(chain: list[Node], graph: Graph) -> Node:
    end = chain[-1]
    # a dense value of the result's own type goes first: the op may write over it
    inputs = sorted(_inputs(chain), key=lambda i: i in graph.weight_by_name or graph.types[i] != end.out.type)
    names: dict[str, Arg] = {name: f"i{n}" for n, name in enumerate(inputs)}
    code = []
    for n in chain:
        code.append(_statement(n, names))
        names[n.out.name] = f"t{len(code) - 1}"
    return Node("fused", tuple(inputs), end.outputs, (("code", render(code)),), end.loc)


def _statement(n: Node, names: dict[str, Arg]) -> Statement:
    args = [names[i] for i in n.inputs]
    if "scalar" in dict(n.attrs):
        args.insert(0 if n.attr("reversed", False) else 1, float(n.attr("scalar")))  # type: ignore[arg-type]
    return Statement("gelu_tanh" if n.op == "gelu" and n.attr("tanh") else n.op, tuple(args))
