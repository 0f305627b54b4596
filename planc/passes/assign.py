"""linear(x, w) -> linear(x, w, store=scheme): each weight of the checkpoint learns how it will be stored.

Early, so that layers are merged only where their storage is the same; `quantize` then does what is written here.
"""

from collections.abc import Iterable
from dataclasses import replace

from planc.compiler.ir.graph import Graph, Node
from planc.passes.options import Options

WEIGHT = {"embedding": 0, "linear": 1, "expert_linear": 2}  # op -> which input is the weight
_MIXES = frozenset({*WEIGHT, "matmul", "attention", "paged_attention"})


def assign(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Writes the storage of every weight of a product or an embedding; counts the nodes."""
    nodes = weighted(graph)
    heads, routers = _behind(graph, graph.outputs), _behind(graph, _choices(graph))
    kinds: dict[str, str] = {}  # of the weight: a tied embedding follows the head
    for n in sorted(nodes, key=lambda n: n.op == "embedding"):
        kind = {"embedding": "embedding", "expert_linear": "expert"}.get(n.op, "linear")
        if n in heads:
            kind = "head"
        elif n in routers:
            kind = "router"
        kinds.setdefault(n.inputs[WEIGHT[n.op]], kind)
    replaced: dict[Node, Node] = {}
    for n in nodes:
        weight = n.inputs[WEIGHT[n.op]]
        store = options.storage.of(graph.weight_by_name[weight].recipe, kinds[weight])
        replaced[n] = replace(n, attrs=(*n.attrs, ("store", store)))
    return graph.rewrite(dict(replaced)), len(replaced)


def weighted(graph: Graph) -> list[Node]:
    """Linear layers, experts and embeddings whose weight comes from the checkpoint: each must get its storage."""
    out = []
    for n in graph.nodes:
        at = WEIGHT.get(n.op)
        weight = graph.weight_by_name.get(n.inputs[at]) if at is not None else None
        if weight and weight.recipe.loads:
            out.append(n)
    return out


def _choices(graph: Graph) -> Iterable[str]:
    return [n.inputs[0] for n in graph.nodes if n.op == "topk"]


def _behind(graph: Graph, names: Iterable[str]) -> set[Node]:
    """The linear layers that values are made of with no other product or attention between."""
    found: set[Node] = set()
    queue, seen = list(names), set(names)
    while queue:
        n = graph.producers.get(queue.pop())
        if n is None:
            continue
        if n.op in _MIXES:
            found |= {n} if n.op == "linear" else set()
            continue
        new = [i for i in n.inputs if i not in seen]
        seen.update(new)
        queue += new
    return found
