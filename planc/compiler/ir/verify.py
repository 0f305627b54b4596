"""The verifier: in goes a graph, out comes nothing, or a PlancError that names the pass and the first thing wrong."""

from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.recipe import infer
from planc.compiler.ir.text import Recipes, parse, to_text
from planc.compiler.ir.types import PACKED
from planc.errors import PlancError


def verify(graph: Graph, stage: str, recipes: Recipes | None = None) -> None:
    """Checks names, attributes, types (by inferring them again), recipes, and that the text parses back equal.

    `recipes` remembers the recipes that went through their text before, for a build that verifies after each pass.

    Raises PlancError that opens with `stage` (the pass that made the graph).
    """
    _names(graph, stage)
    types = graph.types
    for w in graph.weights:
        try:
            made = infer(w.recipe)
        except (KeyError, ValueError) as e:
            raise PlancError(f"{stage}: recipe of weight %{w.name}: {e}") from e
        if made != w.value.type:
            raise PlancError(f"{stage}: recipe of weight %{w.name} makes {made}, declared {w.value.type}")
    for n in graph.nodes:
        _node(n, graph, stage)
    missing = [o for o in graph.outputs if o not in types]
    if missing:
        raise PlancError(f"{stage}: output %{missing[0]} is made by no node")
    recipes = recipes or Recipes()
    if parse(to_text(graph, recipes), recipes) != graph:
        raise PlancError(f"{stage}: the text form does not parse back to an equal graph")
    recipes.keep(graph)


def _names(graph: Graph, stage: str) -> None:
    seen: set[str] = set()
    made = [v.name for v in graph.inputs] + [w.name for w in graph.weights]
    for name in made:
        if name in seen:
            raise PlancError(f"{stage}: %{name} is defined twice")
        seen.add(name)
    for n in graph.nodes:
        for i in n.inputs:
            if i not in seen:
                raise PlancError(f"{stage}: {n.op} at {n.loc} reads %{i} before it is made")
        for v in n.outputs:
            if v.name in seen:
                raise PlancError(f"{stage}: %{v.name} is defined twice, again by {n.op} at {n.loc}")
            seen.add(v.name)


def _node(n: Node, graph: Graph, stage: str) -> None:
    op = OPS.get(n.op)
    where = f"{stage}: {n.op} at {n.loc or 'top level'}"
    if op is None:
        raise PlancError(f"{where}: no such op in the table")
    given = {k for k, _ in n.attrs}
    if given - set(op.attrs):
        raise PlancError(f"{where}: unknown attributes {sorted(given - set(op.attrs))}")
    absent = {k for k, needed in op.attrs.items() if needed} - given
    if absent:
        raise PlancError(f"{where}: missing attributes {sorted(absent)}")
    try:
        types = op.infer(dict(n.attrs), [graph.types[i] for i in n.inputs])
    except (ValueError, KeyError, TypeError) as e:
        raise PlancError(f"{where}: {e}") from e
    except IndexError as e:
        raise PlancError(f"{where}: {len(n.inputs)} inputs are too few") from e
    declared = tuple(v.type for v in n.outputs)
    if types != declared:
        made = ", ".join(map(str, types))
        raise PlancError(f"{where}: makes ({made}), declared ({', '.join(map(str, declared))})")
    for v in n.outputs:
        if v.type.layout in PACKED:
            raise PlancError(f"{where}: an activation cannot have the packed layout {v.type.layout}")
