"""Runs a graph over windows of text, some layers at a time: in go token ids, out come the inputs of products.

A stretch of nodes runs for one window after the other while its weights are held; between two stretches only what the
later ones need of each window is kept. So memory holds the weights of a stretch, the activations between two of them
for all windows, and those inside for one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from planc.compiler.calibrate.fast import ref
from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.parts import part
from planc.compiler.ir.recipe import Reader, Recipe, RowReader, evaluate
from planc.errors import PlancError
from planc.passes.sites import PRODUCTS

HELD = 256 << 20  # bytes of weights, as the graph has them, that a stretch may hold if it can be cut
Window = dict[str, np.ndarray]
Seen = Callable[[Node, np.ndarray], None]


@dataclass(frozen=True)
class Stretch:
    """Nodes that run together, and the names of what later ones read of what is known after them."""

    nodes: tuple[Node, ...]
    kept: frozenset[str]


@dataclass(frozen=True)
class Weights:
    """Reads the weights of a graph, whole or one matrix of a stack."""

    graph: Graph
    read: Reader
    rows: RowReader | None = None

    def array(self, name: str) -> np.ndarray:
        """A weight; PlancError names one that holds NaN or infinity."""
        return self._made(name, self.graph.weight_by_name[name].recipe)

    def matrices(self, name: str, most: int | None = None) -> Iterator[np.ndarray]:
        """Each matrix of a stack [E, N, K], or `most` of them, or the one of [N, K], as float32."""
        weight = self.graph.weight_by_name[name]
        if len(weight.value.type.shape) < 3:
            yield self.array(name).astype(np.float32, copy=False)
            return
        count = int(weight.value.type.shape[0])
        for e in range(0, count, -(-count // min(most or count, count))):
            yield self._made(name, part(weight.recipe, 0, e, e + 1))[0].astype(np.float32, copy=False)

    def parts(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """A table's rows, some at a time, with the number of the first."""
        weight = self.graph.weight_by_name[name]
        count = int(weight.value.type.shape[0])
        pace = max(1, HELD * count // weight.value.type.nbytes())
        for at in range(0, count, pace):
            yield at, self._made(name, part(weight.recipe, 0, at, min(at + pace, count)))

    def _made(self, name: str, recipe: Recipe) -> np.ndarray:
        array = evaluate(recipe, self.read, self.graph.constants, self.rows)
        if not recipe.loads:  # the model's own constants may be infinite, as what masks a choice of experts
            return array
        if array.dtype.kind not in "iub" and not np.isfinite(array.astype(np.float32, copy=False)).all():
            loads = ", ".join(recipe.loads[:3])
            raise PlancError(f"calibration: the weight {name} holds NaN or infinity (tensors: {loads}).")
        return array


def stretches(graph: Graph, wanted: Sequence[Node], held: int = HELD) -> list[Stretch]:
    """The nodes that the inputs of `wanted` products need, and these, cut where little is kept."""
    nodes = _needed(graph, wanted)
    cuts = _cuts(graph, nodes, held)
    return [Stretch(tuple(nodes[a:b]), _live(graph, nodes, b)) for a, b in pairwise(cuts)]


def run(
    graph: Graph, windows: Sequence[np.ndarray], plan: Sequence[Stretch], weights: Weights, seen: Seen
) -> Iterator[Stretch]:
    """Runs the stretches in order; yields each when it is done. `seen` gets each product that runs and its input."""
    state = [_start(ids) for ids in windows]
    for stretch in plan:
        alone = _ALONE.get(stretch.nodes[0].op) if len(stretch.nodes) == 1 else None
        if alone:
            alone(stretch.nodes[0], state, weights, seen)
            _forget(state, stretch.kept)
        else:
            held = {i: weights.array(i) for n in stretch.nodes for i in n.inputs if i in graph.weight_by_name}
            for at, window in enumerate(state):
                state[at] = _run_window(stretch, graph, window, held, seen)
        yield stretch


def _start(ids: np.ndarray) -> Window:
    at = np.arange(len(ids), dtype=np.int32)
    return {"ids": ids.astype(np.int32), "positions": at, "logit_rows": at}


def _run_window(stretch: Stretch, graph: Graph, window: Window, held: Window, seen: Seen) -> Window:
    env = {**window, **held}
    last = {i: n for n in stretch.nodes for i in n.inputs}
    for n in stretch.nodes:
        if n.op in PRODUCTS:
            seen(n, env[n.inputs[0]])
        if n.op not in PRODUCTS or n.out.name in last or n.out.name in stretch.kept:
            _execute(n, env, graph)
        for name in n.inputs:
            if last[name] is n and name not in stretch.kept:
                env.pop(name, None)
    return {name: value for name, value in env.items() if name in stretch.kept and name not in held}


def _execute(n: Node, env: Window, graph: Graph) -> None:
    attrs = dict(n.attrs)
    if "rows" in attrs:
        attrs["length"] = len(env["positions"])
    made = ref(n.op)(attrs, [env[i] for i in n.inputs], [graph.types[i] for i in n.inputs])
    env |= {v.name: array for v, array in zip(n.outputs, made, strict=True)}


def _experts(n: Node, state: list[Window], weights: Weights, seen: Seen) -> None:
    """A product with a stack of matrices, for all windows at once, so that each matrix is read once."""
    x, ids = (_joined(i, state, weights) for i in n.inputs[:2])
    for window in state:
        seen(n, window[n.inputs[0]])
    bias = weights.array(n.inputs[3]) if n.attr("bias", False) else None
    slots = np.broadcast_to(ids, (len(x), ids.shape[-1]))
    rows = np.broadcast_to(x if x.ndim == 3 else x[:, None], (*slots.shape, x.shape[-1]))
    out = np.zeros((*slots.shape, int(n.out.type.shape[-1])), np.float32)
    for e, w in enumerate(weights.matrices(n.inputs[2])):
        mine = slots == e
        out[mine] = rows[mine] @ w.T + (0 if bias is None else bias[e])
    _share(n.out.name, out, state)


def _embedding(n: Node, state: list[Window], weights: Weights, seen: Seen) -> None:
    """Rows of a table, of which a part is read at a time."""
    ids = _joined(n.inputs[1], state, weights)
    out = np.zeros((len(ids), *(int(d) for d in n.out.type.shape[1:])), np.float32)
    for start, rows in weights.parts(n.inputs[0]):
        mine = (ids >= start) & (ids < start + len(rows))
        out[mine] = rows[ids[mine] - start]
    _share(n.out.name, out, state)


_ALONE = {"expert_linear": _experts, "embedding": _embedding}


def _joined(name: str, state: list[Window], weights: Weights) -> np.ndarray:
    """A value of all windows."""
    return np.concatenate([w[name] if name in w else weights.array(name) for w in state])


def _share(name: str, value: np.ndarray, state: list[Window]) -> None:
    """Gives each window its rows."""
    at = 0
    for window in state:
        size = len(window["positions"])
        window[name] = value[at : at + size]
        at += size


def _forget(state: list[Window], kept: frozenset[str]) -> None:
    for window in state:
        for name in [k for k in window if k not in kept]:
            del window[name]


def _needed(graph: Graph, wanted: Sequence[Node]) -> list[Node]:
    names = {n.inputs[0] for n in wanted}
    kept: list[Node] = []
    for n in reversed(graph.nodes):
        if n in wanted or any(v.name in names for v in n.outputs):
            kept.append(n)
            names |= set(n.inputs)
    return kept[::-1]


def _live(graph: Graph, nodes: list[Node], at: int) -> frozenset[str]:
    """What the nodes from `at` on read and earlier ones or the start make; positions, which tell a window's length."""
    read = {i for n in nodes[at:] for i in n.inputs if i not in graph.weight_by_name}
    return frozenset(read - {v.name for n in nodes[at:] for v in n.outputs} | {"positions"})


def _cuts(graph: Graph, nodes: list[Node], held: int) -> list[int]:
    """Where stretches begin and end: where the fewest features are live, once their weights fill what may be held.

    A stack of matrices or a table that is larger is a stretch of its own.
    """
    width = _widths(graph, nodes)
    sizes = [sum(graph.types[i].nbytes() for i in set(n.inputs) if i in graph.weight_by_name) for n in nodes]
    cuts, filled = [0], 0
    for at, n in enumerate(nodes):
        alone = n.op in _ALONE and sizes[at] > held
        if alone:
            cuts += [at] * (at > cuts[-1])
        elif filled + sizes[at] > held and at > cuts[-1]:
            cuts.append(min(range(at, cuts[-1], -1), key=lambda i: width[i]))
            filled = sum(sizes[cuts[-1] : at])
        filled += sizes[at]
        if alone:
            cuts.append(at + 1)
            filled = 0
    return cuts if cuts[-1] == len(nodes) else [*cuts, len(nodes)]


def _widths(graph: Graph, nodes: list[Node]) -> list[int]:
    """Features that are live before each node."""
    first = {v.name: at for at, n in enumerate(nodes) for v in n.outputs}
    last = {i: at for at, n in enumerate(nodes) for i in n.inputs if i in first}
    width = [0] * (len(nodes) + 1)
    for name, end in last.items():
        for at in range(first[name] + 1, end + 1):
            width[at] += graph.types[name].features
    return width
