"""linear(x, a), linear(x, b) -> slices of linear(x, concat(a, b)): q, k, v and gate, up read x once."""

from planc.compiler.ir.graph import Graph, Node, Value, Weight
from planc.compiler.ir.recipe import Recipe, step
from planc.compiler.ir.types import TensorType
from planc.passes.options import Options


def merge_linear(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Merges each group of linear layers that read one value; counts the layers merged."""
    replaced: dict[Node, list[Node]] = {}
    weights: list[Weight] = []
    for group in groups(graph):
        merged, new = _merge(group, graph)
        weights += new
        for i, n in enumerate(group):
            before = [merged] if i == 0 else []
            start = sum(int(m.out.type.shape[-1]) for m in group[:i])
            replaced[n] = [*before, _part(n, merged, start)]
    return graph.rewrite(dict(replaced), add_weights=weights).retyped(), len(replaced)


def mergeable(graph: Graph) -> list[Node]:
    """Linear layers that share their input with another: each must be merged."""
    return [n for group in groups(graph) for n in group]


def groups(graph: Graph) -> list[list[Node]]:
    """Linear layers by input, bias or none, and storage, two or more a group, in graph order."""
    table: dict[object, list[Node]] = {}
    for n in graph.nodes:
        if n.op == "linear" and n.inputs[1] in graph.weight_by_name:
            table.setdefault((n.inputs[0], n.attr("bias", False), n.attr("store", "")), []).append(n)
    return [g for g in table.values() if len(g) > 1]


def _merge(group: list[Node], graph: Graph) -> tuple[Node, list[Weight]]:
    first = group[0]
    name = "+".join(n.out.name for n in group)
    total = sum(int(n.out.type.shape[-1]) for n in group)
    w = _concat(f"{name}.w", [n.inputs[1] for n in group], graph)
    inputs, weights = [first.inputs[0], w.name], [w]
    if first.attr("bias", False):
        b = _concat(f"{name}.b", [n.inputs[2] for n in group], graph)
        inputs.append(b.name)
        weights.append(b)
    out = Value(name, TensorType("f32", (*first.out.type.shape[:-1], total)))
    return Node("linear", tuple(inputs), (out,), first.attrs, first.loc), weights


def _concat(name: str, parts: list[str], graph: Graph) -> Weight:
    ws = [graph.weight_by_name[p] for p in parts]
    shape = (sum(int(w.value.type.shape[0]) for w in ws), *ws[0].value.type.shape[1:])
    recipe: Recipe = step("concat", *(w.recipe for w in ws), axis=0)
    return Weight(Value(name, TensorType(ws[0].value.type.dtype, shape)), recipe)


def _part(n: Node, merged: Node, start: int) -> Node:
    from planc.compiler.ir.ops import OPS

    axis = len(n.out.type.shape) - 1
    attrs = {"axis": axis, "start": start, "stop": start + int(n.out.type.shape[-1])}
    (view,) = OPS["slice"].infer(attrs, [merged.out.type])
    return Node("slice", (merged.out.name,), (Value(n.out.name, view),), tuple(attrs.items()), n.loc)
