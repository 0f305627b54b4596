"""experts(x * g) over all experts -> experts(x * g) over the chosen: an expert whose gate is zero need not run.

Some models send every token, times its gate, through every expert, where all gates but the chosen are zero. What lies
between the product and the sum over experts must give zero for zero; that is computed, not assumed.
"""

from dataclasses import dataclass, replace

import numpy as np

from planc.compiler.ir.graph import Graph, Node, Value
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.recipe import evaluate
from planc.compiler.ir.refs import BINARY, COMPARE, UNARY
from planc.compiler.ir.types import TensorType
from planc.passes.options import Options

_POINTWISE = frozenset({*UNARY, *BINARY, *COMPARE, "gelu"} & OPS.keys())
_MOVES = frozenset({"slice", "transpose", "copy"})


@dataclass(frozen=True)
class _Gates:
    """The gates [T, E] of a product, and the scatter that chose which of them are not zero."""

    name: str
    scatter: Node


def sparse_experts(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Runs the chosen experts alone; counts the expert layers that changed."""
    replaced: dict[Node, list[Node]] = {}
    count = 0
    for first in dense(graph):
        product = graph.producers.get(first.inputs[0])
        found = _gates(product, first, graph) if product else None
        region = _region(first, graph) if found else None
        if product and found and region and product not in replaced:
            index = found.scatter.inputs[1]
            replaced[product] = _chosen(product, found, index, graph)
            experts = [n for n in region if n.op == "expert_linear"]
            replaced |= {n: [replace(n, inputs=(n.inputs[0], index, *n.inputs[2:]))] for n in experts}
            count += len(experts)
    return (graph.rewrite(replaced).retyped(), count) if replaced else (graph, 0)


def dense(graph: Graph) -> list[Node]:
    """Expert layers that run every expert, in order, for each token."""
    return [n for n in graph.nodes if n.op == "expert_linear" and _is_dense(n, graph)]


def _is_dense(n: Node, graph: Graph) -> bool:
    ids = _constant(n.inputs[1], graph)
    return ids is not None and np.array_equal(ids, np.arange(int(graph.types[n.inputs[2]].shape[0])))


def _constant(name: str, graph: Graph) -> np.ndarray | None:
    weight = graph.weight_by_name.get(name)
    if weight is None or weight.recipe.loads:
        return None
    return evaluate(weight.recipe, lambda _: np.empty(0), graph.constants)


def _gates(product: Node, first: Node, graph: Graph) -> _Gates | None:
    """The gates that `product` multiplies tokens by, when all but the chosen ones are zero."""
    if product.op != "mul" or len(product.inputs) != 2 or len(graph.users[product.out.name]) != 1:
        return None
    experts = first.out.type.shape[1]
    for name, other in (product.inputs, product.inputs[::-1]):
        made = graph.producers.get(name)
        if graph.types[name].shape[1:] != (experts, 1) or graph.types[other].shape[1] != 1:
            continue
        if made and made.op == "reshape" and graph.types[made.inputs[0]].shape[1:] == (experts,):
            scatter = _scatter(made.inputs[0], graph)
            return _Gates(made.inputs[0], scatter) if scatter else None
    return None


def _scatter(name: str, graph: Graph) -> Node | None:
    """The scatter below a chain of functions that turn what it does not write into zero."""
    chain: list[Node] = []
    node = graph.producers.get(name)
    while node and node.op in UNARY:
        chain.append(node)
        node = graph.producers.get(node.inputs[0])
    if node is None or node.op != "scatter" or node.attr("add", False):
        return None
    made = graph.producers.get(node.inputs[0])
    base = _constant(made.inputs[0] if made and made.op == "expand" else node.inputs[0], graph)
    if base is None or len(set(base.reshape(-1).tolist())) != 1:
        return None
    value = base.reshape(-1)[:1]
    for n in reversed(chain):
        value = UNARY[n.op](value)
    return node if value[0] == 0 else None


def _region(first: Node, graph: Graph) -> list[Node] | None:
    """Nodes from `first` to the sums over experts, when each of them gives zero for an expert whose input is zero."""
    inside: dict[str, Node] = {}
    todo, summed = [first], False
    while todo:
        n = todo.pop(0)
        if n.outputs and n.out.name in inside:
            continue
        if n.op == "sum" and graph.producers[n.inputs[0]].op == "transpose":
            summed = True
            continue
        if not _keeps_zero(n, first, inside, graph) or n.out.name in graph.outputs:
            return None
        inside[n.out.name] = n
        todo += graph.users[n.out.name]
    return list(inside.values()) if summed else None


def _keeps_zero(n: Node, first: Node, inside: dict[str, Node], graph: Graph) -> bool:
    if n.op == "expert_linear":
        return n.inputs[1] == first.inputs[1] and not n.attr("bias", False)
    if n.op in _MOVES:
        return n.attr("axis", 2) != 1
    if n.op not in _POINTWISE:
        return False
    zero = np.zeros(1, np.float32)
    given = [zero if i in inside else _number(i, graph) for i in n.inputs]
    if any(g is None for g in given):
        return all(i in inside or i in graph.weight_by_name for i in n.inputs) and n.op == "mul"
    t = TensorType("f32", (1,))
    (out,) = OPS[n.op].ref(dict(n.attrs), [g for g in given if g is not None], [t] * len(given))
    return bool(out.reshape(-1)[0] == 0)


def _number(name: str, graph: Graph) -> np.ndarray | None:
    value = _constant(name, graph)
    return value.reshape(1) if value is not None and value.size == 1 else None


def _chosen(product: Node, gates: _Gates, index: str, graph: Graph) -> list[Node]:
    """The tokens times their chosen gates alone, [T, k, D]."""
    stem, slots = product.out.name, graph.types[index].shape
    taken = Value(f"{stem}.gates", TensorType("f32", slots))
    column = Value(f"{stem}.gates.column", TensorType("f32", (*slots, 1)))
    other = next(i for i in product.inputs if graph.types[i].shape[1:] != (*graph.types[gates.name].shape[1:], 1))
    return [
        Node("gather", (gates.name, index), (taken,), (), product.loc),
        Node("reshape", (taken.name,), (column,), (("shape", (-1, *(int(d) for d in slots[1:]), 1)),), product.loc),
        replace(product, inputs=(other, column.name)),
    ]
