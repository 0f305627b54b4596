"""take_rows(f(x)) -> f(take_rows(x)): what only the wanted logits need is computed for their rows alone.

Tokens mix in attention only, so everything after the last of it can run on R rows in place of T.
"""

from dataclasses import replace

from planc.compiler.ir.graph import Graph, Node, Value
from planc.compiler.ir.ops import OPS
from planc.passes.options import Options

_ROWS = "logit_rows"
_STAYS = frozenset({"attention", "kv_append", "embedding", "take_rows"})


def last_rows(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Moves the selection of rows as far up as it goes; counts the nodes that run on fewer rows."""
    late = _late(graph)
    if not late:
        return graph, 0
    taken: dict[str, Value] = {}
    nodes: list[Node] = []
    rename = {n.out.name: n.inputs[0] for n in graph.nodes if _takes(n) and n.inputs[0] in late}
    for n in graph.nodes:
        if n.outputs and n.out.name in rename:
            continue
        if n.outputs and n.out.name in late:
            nodes += [_take(i, n, graph, taken) for i in dict.fromkeys(n.inputs) if _is_early(i, graph, late, taken)]
            n = replace(n, inputs=tuple(taken[i].name if i in taken else i for i in n.inputs))
        nodes.append(replace(n, inputs=tuple(rename.get(i, i) for i in n.inputs)))
    outputs = tuple(rename.get(o, o) for o in graph.outputs)
    moved = _with_names(replace(graph, nodes=tuple(nodes), outputs=outputs), graph.outputs).without_dead().retyped()
    return moved, len(late)


def _takes(n: Node) -> bool:
    return n.op == "take_rows" and n.inputs[1] == _ROWS


def _late(graph: Graph) -> set[str]:
    """Values over tokens that nothing but taken rows, and other such values, are made from."""
    late: set[str] = set()
    for n in reversed(graph.nodes):
        if n.op in _STAYS or OPS[n.op].effect or not n.outputs or n.out.type.shape[:1] != ("T",):
            continue
        if n.attr("rows", ""):  # says by name how many rows it makes
            continue
        users = [u for v in n.outputs for u in graph.users[v.name]]
        read = [v.name for v in n.outputs if v.name in graph.outputs]
        if users and not read and all(_takes(u) or (u.outputs and u.out.name in late) for u in users):
            late |= {v.name for v in n.outputs}
    return late


def _is_early(name: str, graph: Graph, late: set[str], taken: dict[str, Value]) -> bool:
    """Whether a value over all tokens meets one over the wanted rows and has not been taken from yet."""
    return graph.types[name].shape[:1] == ("T",) and name not in late and name not in taken


def _take(name: str, reader: Node, graph: Graph, taken: dict[str, Value]) -> Node:
    (made,) = OPS["take_rows"].infer({}, [graph.types[name], graph.types[_ROWS]])
    taken[name] = Value(f"{name}.taken", made)
    return Node("take_rows", (name, _ROWS), (taken[name],), (), reader.loc)


def _with_names(graph: Graph, outputs: tuple[str, ...]) -> Graph:
    """The graph whose outputs bear these names."""
    names = {old: new for old, new in zip(graph.outputs, outputs, strict=True) if old != new}
    if not names:
        return graph

    def renamed(n: Node) -> Node:
        values = tuple(replace(v, name=names.get(v.name, v.name)) for v in n.outputs)
        return replace(n, inputs=tuple(names.get(i, i) for i in n.inputs), outputs=values)

    return replace(graph.map_nodes(renamed), outputs=outputs)
