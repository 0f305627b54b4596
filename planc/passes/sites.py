"""y = f(x / s) @ (w * s).T: in goes a graph, out come the places where a scale may move from activations to weights.

A norm's weight, or the rows of a product whose results reach another product by steps that keep factors apart (a gated
activation's second half, an attention's values), can take 1 / s; every product that reads what they make takes s.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.ops import OPS

NORMS = frozenset({"rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"})
PRODUCTS = {"linear": 1, "expert_linear": 2}  # op -> which input is the weight
_MOVES = frozenset({"reshape", "slice", "transpose", "copy", "take_rows", "expand"})
_HOMOGENEOUS = frozenset({("relu", 0), ("act_mul", 1)})  # f(.., x * s, ..) = f(.., x, ..) * s, for s > 0


@dataclass(frozen=True)
class Reader:
    """A product that takes s: `units[k]` is the scale of its input's feature k."""

    node: Node
    units: np.ndarray


@dataclass(frozen=True)
class Site:
    """One vector of scales. `maker` takes 1 / s: a norm one for each feature, a product in `rows[unit]`."""

    name: str
    maker: Node
    size: int
    rows: np.ndarray | None
    readers: tuple[Reader, ...]


@dataclass(frozen=True)
class _End:
    """Where features end up: input `at` of a node (None: an output of the graph); `index` tells their origins."""

    node: Node | None
    at: int
    index: np.ndarray


def sites(graph: Graph) -> list[Site]:
    """All sites, in the order of their makers. A product is a reader of one at most."""
    found: list[Site] = []
    for n in graph.nodes:
        if n.op in NORMS:
            found += _of_norm(n, graph)
        elif n.op in PRODUCTS and _owned(n, graph):
            found += _of_rows(n, graph)
    return found


def weight_of(node: Node) -> str:
    """The name of a product's weight."""
    return node.inputs[PRODUCTS[node.op]]


def _owned(node: Node, graph: Graph) -> bool:
    """Whether the product's weight comes from the checkpoint, and nothing else reads it."""
    name = weight_of(node)
    weight = graph.weight_by_name.get(name)
    return weight is not None and bool(weight.recipe.loads) and graph.users[name] == (node,)


def _of_norm(n: Node, graph: Graph) -> list[Site]:
    features = tuple(int(d) for d in n.out.type.shape[1:])
    size = features[-1]
    ends = list(_ends(graph, n.out.name, np.broadcast_to(np.arange(size), features)))
    readers = [_reader(e, graph) for e in ends]
    kept = tuple(r for r in readers if r is not None)
    return [Site(n.out.name, n, size, None, kept)] if kept and len(kept) == len(ends) else []


def _of_rows(n: Node, graph: Graph) -> list[Site]:
    """Sites of a product: its rows in parts, each read by products alone."""
    features = tuple(int(d) for d in n.out.type.shape[1:])
    ends = list(_ends(graph, n.out.name, np.broadcast_to(np.arange(features[-1]), features)))
    made, taken = [], np.zeros(features[-1], bool)
    for end in ends:
        rows = np.unique(end.index)
        group = [e for e in ends if np.isin(rows, e.index).any()]
        readers = [_reader(e, graph) for e in group]
        if taken[rows].any() or None in readers or any(not np.isin(e.index, rows).all() for e in group):
            continue
        taken[rows] = True
        mine = tuple(Reader(r.node, np.searchsorted(rows, r.units)) for r in readers if r is not None)
        made.append(Site(mine[0].node.inputs[0], n, len(rows), rows, mine))
    return made


def _reader(end: _End, graph: Graph) -> Reader | None:
    """The product that an end is, when it is one and all its rows read the features in one order."""
    n = end.node
    if n is None or n.op not in PRODUCTS or end.at != 0 or not _owned(n, graph):
        return None
    rows = end.index.reshape(-1, end.index.shape[-1])
    return Reader(n, rows[0]) if (rows == rows[0]).all() else None


def _ends(graph: Graph, name: str, index: np.ndarray) -> Iterator[_End]:
    if name in graph.outputs:
        yield _End(None, 0, index)
    for n in graph.users[name]:
        for at, read in enumerate(n.inputs):
            if read != name:
                continue
            moved = _through(n, at, index, graph)
            if moved is None:
                yield _End(n, at, index)
            else:
                yield from _ends(graph, n.out.name, moved)


def _through(n: Node, at: int, index: np.ndarray, graph: Graph) -> np.ndarray | None:
    """The origins of a node's features, when the node keeps each origin's factor; None otherwise."""
    if n.op == "take_rows" and at == 0:
        return index
    if n.op in _MOVES and len(n.inputs) == 1 and n.out.type.shape[0] == graph.types[n.inputs[0]].shape[0]:
        made = OPS[n.op].ref(dict(n.attrs), [index[None]], [graph.types[i] for i in n.inputs])
        return np.asarray(made[0][0])
    if (n.op, at) in _HOMOGENEOUS or (n.op == "mul" and len(n.inputs) == 1):
        return index
    if n.op == "attention" and at == 2:
        heads = int(graph.types[n.inputs[0]].shape[1])
        return np.repeat(index, heads // len(index), axis=0)
    return None
