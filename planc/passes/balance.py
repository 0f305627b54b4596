"""norm(k) * w, norm(q) * v -> norm(k) * (w / s), norm(q) * (v * s), where keys are cached as codes at equal steps.

Few features that are large by their norm's weight then cost the others no digits. Where keys and queries have no norms
of their own, nothing is changed.
"""

from planc.compiler.ir.graph import Graph, Node, Value, Weight
from planc.compiler.ir.recipe import infer, step
from planc.passes.options import Options
from planc.passes.util import readers

_PARTS = ("keys", "queries")


def balance(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Balances the norms of each attention that has them, for caches of i8; counts the attentions."""
    if options.kv_dtype != "i8":
        return graph, 0
    replaced: dict[Node, Node | None] = {}
    made: list[Weight] = []
    count = 0
    for n in [n for n in graph.nodes if n.op == "attention"]:
        found = _norms(n, graph)
        if found is None:
            continue
        norms, half, interleaved = found
        weights = [graph.weight_by_name[norm.inputs[1]] for norm in norms]
        recipes = [w.recipe for w in weights]
        for norm, weight, of in zip(norms, weights, _PARTS, strict=True):
            recipe = step("balance", *recipes, of=of, half=half, interleaved=interleaved)
            value = Value(f"{weight.name}.balanced", infer(recipe))
            made.append(Weight(value, recipe))
            replaced[norm] = Node(norm.op, (norm.inputs[0], value.name), norm.outputs, norm.attrs, norm.loc)
        count += 1
    return graph.rewrite(replaced, add_weights=made), count


def _norms(attention: Node, graph: Graph) -> tuple[tuple[Node, Node], int, bool] | None:
    """The norms of the keys and queries of an attention, the pairs that turn behind them, and how these lie."""
    q, k = (_norm(graph.producers.get(name), graph) for name in attention.inputs[:2])
    if q is None or k is None or q[0] is k[0] or q[1:] != k[1:]:
        return None
    return (k[0], q[0]), q[1], q[2]


def _norm(n: Node | None, graph: Graph) -> tuple[Node, int, bool] | None:
    """The norm behind a rotation, or none; all that it makes goes to the one attention, its weight is of no other."""
    half, interleaved = 0, False
    if n is not None and n.op == "rotary" and readers(graph, n.out.name) == 1:
        half, interleaved = int(graph.types[n.inputs[1]].shape[1]), bool(n.attr("interleaved"))
        n = graph.producers.get(n.inputs[0])
    while n is not None and _splits_heads(n, graph):
        n = graph.producers.get(n.inputs[0])
    if n is None or n.op != "rms_norm" or len(n.inputs) != 2 or readers(graph, n.out.name) != 1:
        return None
    weight = graph.weight_by_name.get(n.inputs[1])
    if weight is None or graph.users[weight.name] != (n,) or infer(weight.recipe).dtype != "f32":
        return None
    return (n, half, interleaved) if infer(weight.recipe).shape == n.out.type.shape[-1:] else None


def _splits_heads(n: Node, graph: Graph) -> bool:
    """Whether a node only says where heads begin: one KV head is normed without an axis of heads."""
    same = n.op == "reshape" and graph.types[n.inputs[0]].shape[-1] == n.out.type.shape[-1]
    return same and readers(graph, n.out.name) == 1
