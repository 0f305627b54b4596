"""x * rsqrt(mean(x^2) + eps) * w -> rms_norm(x, w); (x - mean) * rsqrt(var + eps) * w -> layer_norm(x, w).

The weight may already be folded (1 + w), may come before or after a cast, or be absent.
"""

from planc.compiler.ir.graph import Graph, Node
from planc.passes.options import Options


def norm(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Replaces each normalisation by one op; counts them."""
    replaced: dict[Node, Node | None] = {}
    for root in roots(graph):
        found = _rms(root, graph)
        if found:
            end, new = found
            replaced[end] = new
    return graph.rewrite(replaced), len(replaced)


def roots(graph: Graph) -> list[Node]:
    """The reciprocal square roots that must be gone afterwards: each stands for one norm."""
    return [n for n in graph.nodes if n.op == "rsqrt"]


def _rms(root: Node, graph: Graph) -> tuple[Node, Node] | None:
    """The last node of the norm around `root`, and the op that takes its place."""
    made = graph.producers
    add = made.get(root.inputs[0])
    if add is None or add.op != "add" or add.attr("scalar", 0.0) == 0.0:
        return None
    mean = made.get(add.inputs[0])
    square = made.get(mean.inputs[0]) if mean and mean.op == "mean" else None
    if square is None or square.op != "square":
        return None
    scaled = _user(root.out.name, square.inputs[0], graph)
    if scaled is None:
        return None
    source, eps = square.inputs[0], add.attr("scalar")
    centred = _centre(source, graph)
    op, x = ("layer_norm", centred) if centred else ("rms_norm", source)
    end, weight = _weighted(scaled, graph)
    inputs = (x, weight) if weight else (x,)
    return end, Node(op, inputs, end.outputs, (("eps", eps),), root.loc)


def _user(name: str, other: str, graph: Graph) -> Node | None:
    """The product of two values, when exactly it reads the first."""
    users = graph.users[name]
    if len(users) == 1 and users[0].op == "mul" and set(users[0].inputs) == {name, other}:
        return users[0]
    return None


def _centre(name: str, graph: Graph) -> str | None:
    """x, when `name` is x - mean(x)."""
    sub = graph.producers.get(name)
    mean = graph.producers.get(sub.inputs[1]) if sub and sub.op == "sub" and len(sub.inputs) == 2 else None
    return sub.inputs[0] if sub and mean and mean.op == "mean" and mean.inputs[0] == sub.inputs[0] else None


def _weighted(scaled: Node, graph: Graph) -> tuple[Node, str | None]:
    """The multiplication by the norm's weight after `scaled`, when there is one."""
    users = graph.users[scaled.out.name]
    if len(users) == 1 and users[0].op == "mul" and len(users[0].inputs) == 2:
        other = next((i for i in users[0].inputs if i != scaled.out.name), None)
        weight = graph.weight_by_name.get(other or "")
        if weight and weight.value.type.shape == scaled.out.type.shape[-1:]:
            return users[0], weight.name
    return scaled, None
