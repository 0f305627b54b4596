"""op(weights) -> weight; f(positions, constants) -> table[positions]: what no token changes is computed once.

A folded weight keeps a recipe (the op over the recipes of its inputs), so a fine-tune of the model repacks without a
recompile. What depends on positions alone is evaluated for every position below max_model_len, and looked up.
"""

from dataclasses import replace

import numpy as np

from planc.compiler.ir.graph import Graph, Node, Value, Weight
from planc.compiler.ir.interp import Env, execute
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.recipe import Recipe, evaluate
from planc.errors import PlancError
from planc.passes.options import Options
from planc.passes.util import const_weight, is_constant

_LOOKUPS = ("embedding", "take_rows")


def fold(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Folds weights, then positions; counts the nodes that went."""
    graph, weights = _fold_weights(graph)
    graph, tables = _fold_positions(graph, options)
    return graph, weights + tables


def foldable(graph: Graph) -> list[Node]:
    """Nodes that must be gone afterwards: those that read nothing but weights."""
    names = set(graph.weight_by_name)
    return [n for n in graph.nodes if n.inputs and names.issuperset(n.inputs) and not _has_rows(n)]


def _fold_weights(graph: Graph) -> tuple[Graph, int]:
    weights = dict(graph.weight_by_name)
    folded: dict[Node, None] = {}
    for n in graph.nodes:
        if not n.inputs or not all(i in weights for i in n.inputs) or len(n.outputs) != 1 or _has_rows(n):
            continue
        recipe = Recipe(n.op, tuple(weights[i].recipe for i in n.inputs), n.attrs)
        weights[n.out.name] = Weight(n.out, recipe)
        folded[n] = None
    added = [w for name, w in weights.items() if name not in graph.weight_by_name]
    return graph.rewrite(folded, add_weights=added), len(folded)


def _has_rows(n: Node) -> bool:
    """True when the step decides the shape: an `expand` to its tokens."""
    return any(isinstance(d, str) for v in n.outputs for d in v.type.shape)


def _fold_positions(graph: Graph, options: Options) -> tuple[Graph, int]:
    known = _known_by_position(graph)
    if not known:
        return graph, 0
    frontier = [
        n for n in known if graph.outputs.count(n.out.name) or any(u not in known for u in graph.users[n.out.name])
    ]
    # an integer made from positions (a row to look up) stays as it is; a table would hold it as float32
    frontier = [n for n in frontier if n.out.type.dtype == "f32" and not _is_table_lookup(n, graph)]
    values = _evaluate(graph, known, np.arange(options.max_model_len, dtype=np.int32))
    _check_rows(graph, known, frontier, values, options.max_model_len)
    replaced: dict[Node, list[Node]] = {}
    weights: list[Weight] = []
    constants: dict[str, np.ndarray] = {}
    for n in frontier:
        weight, entry = const_weight(_flat(values[n.out.name]), "table")
        weights.append(weight)
        constants |= entry
        replaced[n] = _with_reshape(n, _lookup(n, weight))
    return graph.rewrite(dict(replaced), add_weights=weights, add_constants=constants).retyped(), len(frontier)


def _known_by_position(graph: Graph) -> dict[Node, None]:
    """Nodes whose value positions and constants decide, in order; at least one of their inputs is such a value."""
    by_position = {"positions"}
    constant = {w.name for w in graph.weights if is_constant(w)}
    known: dict[Node, None] = {}
    for n in graph.nodes:
        if any(i in by_position for i in n.inputs) and all(i in by_position | constant for i in n.inputs):
            known[n] = None
            by_position |= {v.name for v in n.outputs}
    return known


def _is_table_lookup(n: Node, graph: Graph) -> bool:
    return n.op in _LOOKUPS and n.inputs[0] in graph.weight_by_name and n.inputs[1] == "positions"


def _evaluate(graph: Graph, known: dict[Node, None], positions: np.ndarray) -> Env:
    env: Env = {"positions": positions}
    for w in graph.weights:
        if is_constant(w):
            env[w.name] = evaluate(w.recipe, lambda name: np.empty(0), graph.constants)
    for n in known:
        execute(n, env, graph)
    return env


def _check_rows(graph: Graph, known: dict[Node, None], frontier: list[Node], values: Env, length: int) -> None:
    """A table is right only when each row depends on its own position: proved on a permutation of some positions."""
    some = np.random.default_rng(0).permutation(length)[: min(length, 64)].astype(np.int32)
    again = _evaluate(graph, known, some)
    for n in frontier:
        if not np.allclose(again[n.out.name], values[n.out.name][some], rtol=1e-6, atol=1e-6, equal_nan=True):
            raise PlancError(
                f"fold: {n.op} at {n.loc} mixes positions of different tokens, so it is no table of positions. "
                "This model cannot be compiled yet."
            )


def _flat(table: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(table.reshape(len(table), -1), dtype=np.float32)


def _lookup(n: Node, weight: Weight) -> Node:
    out = Value(f"{n.out.name}.rows", replace(n.out.type, shape=("T", weight.value.type.shape[1]), layout="row"))
    return Node("embedding", (weight.name, "positions"), (out,), (), n.loc)


def _with_reshape(n: Node, lookup: Node) -> list[Node]:
    shape = (-1, *(int(d) for d in n.out.type.shape[1:]))
    return [lookup, Node("reshape", (lookup.out.name,), (n.out,), (("shape", shape),), n.loc)]


assert all(name in OPS for name in _LOOKUPS)
