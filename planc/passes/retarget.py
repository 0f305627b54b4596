"""planned graph -> the same for another target: pages, packed layouts and copies are taken off and made again.

What stands before `kv_layout` in the pipeline is the same for every target; a plan's own graph gives it back, so that a
plan of a GPU can be measured by one for this CPU without a trace.
"""

from collections.abc import Mapping
from dataclasses import replace

from planc.compiler.ir.graph import Graph, Node, Weight
from planc.compiler.ir.types import Attr
from planc.compiler.ir.verify import verify
from planc.passes.options import Options
from planc.passes.pipeline import PIPELINE
from planc.passes.unfused import unfused

_OF_PAGES = frozenset({"heads", "k_dim", "v_dim", "block", "dtype", "page_bytes"})


def retarget(graph: Graph, options: Options) -> Graph:
    """The graph as the pipeline would have planned it for `options.target`."""
    graph = unplanned(graph)
    first = [row.name for row in PIPELINE].index("kv_layout")
    for row in PIPELINE[first:]:
        graph, _ = row.run(graph, options)
    verify(graph, "retarget")
    return graph


def unplanned(graph: Graph) -> Graph:
    """The graph before `kv_layout`: attention over its own keys and values, weights and views as they were."""
    graph = unfused(graph)
    stored = {n.attr("layer"): n.inputs[:2] for n in graph.nodes if n.op == "kv_append"}
    copies = {n: n.inputs[0] for n in graph.nodes if n.op == "copy" and n.out.name.startswith(f"{n.inputs[0]}.dense.")}
    replaced: dict[Node, Node | None] = dict.fromkeys(copies)
    for n in graph.nodes:
        if n.op == "kv_append":
            replaced[n] = None
        elif n.op == "paged_attention":
            replaced[n] = _attention(n, stored)
    rename = {n.out.name: source for n, source in copies.items()}
    graph = replace(graph, weights=tuple(_unpacked(w) for w in graph.weights))
    return graph.rewrite(replaced, rename=rename).retyped()


def _attention(n: Node, stored: Mapping[Attr, tuple[str, ...]]) -> Node:
    attrs = tuple((k, v) for k, v in n.attrs if k not in _OF_PAGES and not k.endswith("_offset"))
    inputs = (n.inputs[0], *stored[n.attr("layer")], *n.inputs[5:])
    return Node("attention", inputs, n.outputs, attrs, n.loc)


def _unpacked(w: Weight) -> Weight:
    if w.recipe.op != "pack":
        return w
    return Weight(replace(w.value, type=replace(w.value.type, layout="row")), w.recipe.inputs[0])
