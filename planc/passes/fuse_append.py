"""rotary(q), rotary(k), kv_append -> rotary_append: queries turn where keys do, and keys go to their page as they turn.

Two launches less a layer, and turned keys are never written and read again.
"""

from collections.abc import Mapping
from dataclasses import replace

from planc.compiler.ir.graph import Graph, Node, Value
from planc.passes.options import Options

_OWN = frozenset({"interleaved"})  # attributes of the rotation; the others are of the cache


def fuse_append(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Fuses each write of keys that are turned by the angles of their layer's queries; counts them."""
    place = {n: i for i, n in enumerate(graph.nodes)}
    replaced: dict[Node, Node | None] = {}
    for append in [n for n in graph.nodes if n.op == "kv_append"]:
        turns = _turns(append, graph, place)
        if turns is None:
            continue
        q, k = turns
        inputs = (q.inputs[0], k.inputs[0], append.inputs[1], *q.inputs[1:], *append.inputs[2:])
        replaced |= {q: None, k: None}
        replaced[append] = Node("rotary_append", inputs, q.outputs, (*q.attrs, *append.attrs), append.loc)
    return graph.rewrite(replaced), len(replaced) // 3


def apart(graph: Graph) -> Graph:
    """The graph with each rotary_append as the three nodes that it stands for."""
    fused = [n for n in graph.nodes if n.op == "rotary_append"]
    return graph.rewrite({n: _apart(n, graph) for n in fused}) if fused else graph


def _turns(append: Node, graph: Graph, place: Mapping[Node, int]) -> tuple[Node, Node] | None:
    """The rotations of the queries and keys of a layer, if nothing else reads these keys, nor the queries too early."""
    k = graph.producers.get(append.inputs[0])
    if k is None or k.op != "rotary" or graph.users[k.out.name] != (append,) or k.out.name in graph.outputs:
        return None
    later = graph.nodes[place[append] :]
    readers = (n for n in later if n.op == "paged_attention" and n.attr("layer") == append.attr("layer"))
    q = graph.producers.get(next(readers).inputs[0])
    if q is None or q.op != "rotary" or (q.inputs[1:], q.attrs) != (k.inputs[1:], k.attrs):
        return None
    early = any(place[n] < place[append] for n in graph.users[q.out.name])
    return None if early or graph.types[q.inputs[0]].dtype != graph.types[k.inputs[0]].dtype else (q, k)


def _apart(n: Node, graph: Graph) -> list[Node]:
    q, k, v, *angles, slots, kv = n.inputs
    own = tuple((key, value) for key, value in n.attrs if key in _OWN)
    of_cache = tuple((key, value) for key, value in n.attrs if key not in _OWN)
    keys = Value(f"{n.out.name}.keys", replace(graph.types[k], layout="row"))
    return [
        Node("rotary", (q, *angles), n.outputs, own, n.loc),
        Node("rotary", (k, *angles), (keys,), own, n.loc),
        Node("kv_append", (keys.name, v, slots, kv), (), of_cache, n.loc),
    ]
