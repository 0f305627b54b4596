"""x cos + rotate(x) sin -> rotary(x, cos, sin, positions): found by probing the region, whatever its spelling.

For a fixed position the region between a projection and the attention is a linear map of each head. Probing it with the
basis shows the map; when every output has at most two inputs and these are the pairs of a rotation, the region becomes
one op, and its tables are read off the region itself.
"""

from dataclasses import dataclass

import numpy as np

from planc.compiler.ir.graph import Graph, Node, Value, Weight
from planc.compiler.ir.interp import Env, execute
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.recipe import evaluate
from planc.compiler.ir.types import Attr, TensorType
from planc.passes.options import Options
from planc.passes.util import const_weight, is_constant

_LINEAR = {"mul", "add", "sub", "neg", "concat", "slice", "reshape", "transpose", "copy", "expand"}
_MOVES = {"concat", "slice", "reshape", "transpose", "neg", "copy", "expand"}
_CHUNK = 1 << 21  # elements of one probe: bounds its memory


@dataclass(frozen=True)
class Region:
    """Nodes from `source` to `end`, in order; both are [T, heads, D], or [T, D] when there is one head."""

    source: str
    end: Node
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Rotation:
    """What a region was found to be: tables f32[length, R/2], the pairs it reads, and whether it deals them out apart
    (it reads neighbours and writes halves)."""

    cos: np.ndarray
    sin: np.ndarray
    interleaved: bool
    apart: bool


def rotary(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Replaces each rotation by one op; counts the ends at which one was found."""
    finder = _Finder(graph, options)
    count = sum(finder.match(end) for end in ends(graph))
    return graph.rewrite(finder.replaced, add_weights=finder.weights, add_constants=finder.constants).retyped(), count


class _Finder:
    """Probes regions, equal ones once, and collects what takes their place."""

    def __init__(self, graph: Graph, options: Options) -> None:
        self.replaced: dict[Node, list[Node]] = {}
        self.weights: list[Weight] = []
        self.constants: dict[str, np.ndarray] = {}
        self._graph, self._options = graph, options
        self._tables = _tables(graph)
        self._rotating, self._by_position = _rotating(graph)
        self._turning = {n.out.name for n in self._rotating}
        self._known: dict[object, Rotation | None] = {}

    def match(self, end: Node) -> bool:
        """Whether a rotation ends here, or in a part of what is only put together here."""
        if end in self.replaced:
            return True
        region = _region(end, self._graph, self._turning)
        found = self._probed(region) if region else None
        if region and found:
            self._replace(region, found)
            return True
        makers = [self._graph.producers.get(i) for i in end.inputs] if end.op in _MOVES else []
        parts = [n for n in makers if n and n in self._rotating and n not in self._by_position]
        return any([self.match(n) for n in parts])

    def _probed(self, region: Region) -> Rotation | None:
        key = _spelling(region, self._graph)
        if key not in self._known:
            self._known[key] = _probe(region, self._graph, self._tables, self._options.max_model_len)
        return self._known[key]

    def _replace(self, region: Region, found: Rotation) -> None:
        cos, cos_entry = const_weight(found.cos, "cos")
        sin, sin_entry = const_weight(found.sin, "sin")
        self.weights += [cos, sin]
        self.constants |= cos_entry | sin_entry
        self.replaced[region.end] = _rotated(region, cos, sin, found, self._graph)


def _rotated(region: Region, cos: Weight, sin: Weight, found: Rotation, graph: Graph) -> list[Node]:
    """The op over [T, heads, D], with a reshape on either side that has no axis of heads."""
    end, source = region.end, graph.types[region.source]
    heads, dim = _heads(source)
    nodes: list[Node] = []

    def then(op: str, name: str, *inputs: str, **attrs: Attr) -> str:
        types = [made.get(i) or graph.types[i] for i in inputs]
        out = Value(name, OPS[op].infer(attrs, types)[0])
        made[name] = out.type
        nodes.append(Node(op, inputs, (out,), tuple(attrs.items()), end.loc))
        return name

    made: dict[str, TensorType] = {w.name: w.value.type for w in (cos, sin)}
    x, name = region.source, end.out.name
    if len(source.shape) == 2:
        x = then("reshape", f"{name}.heads", x, shape=(-1, heads, dim))
    last = not found.apart and len(end.out.type.shape) == 3
    x = then(
        "rotary", name if last else f"{name}.rotary", x, cos.name, sin.name, "positions", interleaved=found.interleaved
    )
    if found.apart:
        x = then("reshape", f"{name}.pairs", x, shape=(-1, heads, dim // 2, 2))
        x = then("transpose", f"{name}.apart", x, perm=(0, 1, 3, 2))
    if not last:
        then("reshape", name, x, shape=(-1, *(int(d) for d in end.out.type.shape[1:])))
    return nodes


def _heads(t: TensorType) -> tuple[int, int]:
    """(heads, D) of [T, heads, D] or [T, D]."""
    return (1, int(t.shape[1])) if len(t.shape) == 2 else (int(t.shape[1]), int(t.shape[2]))


def ends(graph: Graph) -> list[Node]:
    """Where rotations end: values made linearly from position tables and tokens, read by something that is not."""
    rotating, by_position = _rotating(graph)
    return [n for n in rotating if n not in by_position and _read_outside(n, rotating, graph)]


def _read_outside(n: Node, inside: dict[Node, None], graph: Graph) -> bool:
    return n.out.name in graph.outputs or any(u not in inside for u in graph.users[n.out.name])


def _lookup(n: Node, graph: Graph) -> bool:
    """True for a table of constants looked up by position."""
    weight = graph.weight_by_name.get(n.inputs[0]) if n.op == "embedding" else None
    return bool(weight and is_constant(weight) and n.inputs[1] == "positions")


def _rotating(graph: Graph) -> tuple[dict[Node, None], dict[Node, None]]:
    """Nodes that depend linearly on position tables; and those of them that depend on nothing else."""
    by_position: dict[Node, None] = {}
    rotating: dict[Node, None] = {}
    names: set[str] = set()
    for n in graph.nodes:
        made = [graph.producers.get(i) for i in n.inputs]
        if _lookup(n, graph) or (n.op in _MOVES and all(m in by_position for m in made)):
            by_position[n] = rotating[n] = None
            names.add(n.out.name)
        elif n.op in _LINEAR and names.intersection(n.inputs) and _stays_linear(n, made, by_position, rotating):
            rotating[n] = None
            names.add(n.out.name)
    return rotating, by_position


def _stays_linear(n: Node, made: list[Node | None], by_position: dict[Node, None], rotating: dict[Node, None]) -> bool:
    if n.op == "mul" and len(n.inputs) == 2:
        return any(m in by_position for m in made)
    if n.op in ("add", "sub"):  # a position table added to tokens is a learned position, not a rotation
        return len(n.inputs) == 2 and all(m in rotating and m not in by_position for m in made)
    return True


def _region(end: Node, graph: Graph, turning: set[str]) -> Region | None:
    """The region that ends in `end`, from the nearest single value that all of it is made from and no table touched."""
    index = graph.order
    frontier = {end.out.name}
    nodes: list[Node] = []
    while frontier:
        last = max(frontier, key=lambda name: index[name])
        source_type = graph.types[last]
        if len(frontier) == 1 and last not in turning and _same_heads(source_type, end.out.type):
            return Region(last, end, tuple(nodes[::-1]))
        node = graph.producers.get(last)
        if node is None or node.op not in _LINEAR:
            return None
        nodes.append(node)
        data = [i for i in node.inputs if not _only_position(i, graph)]
        frontier = (frontier - {last}) | set(data)
    return None


def _same_heads(a: TensorType, b: TensorType) -> bool:
    return len(a.shape) in (2, 3) and len(b.shape) in (2, 3) and _heads(a) == _heads(b)


def _only_position(name: str, graph: Graph) -> bool:
    n = graph.producers.get(name)
    if n is None:
        return name in graph.weight_by_name
    return _lookup(n, graph) or (n.op in _MOVES and all(_only_position(i, graph) for i in n.inputs))


def _spelling(region: Region, graph: Graph) -> object:
    """Equal for regions that compute the same from different sources: layers share one probe."""
    names = {region.source: "x"} | {n.out.name: f"n{i}" for i, n in enumerate(region.nodes)}

    def word(name: str) -> object:
        if name in names:
            return names[name]
        n = graph.producers.get(name)
        return (n.op, n.attrs, tuple(word(i) for i in n.inputs)) if n else name

    shape = graph.types[region.source].shape
    return (shape, tuple((n.op, n.attrs, tuple(word(i) for i in n.inputs)) for n in region.nodes))


def _tables(graph: Graph) -> Env:
    lookups = {n.inputs[0] for n in graph.nodes if _lookup(n, graph)}
    return {w.name: evaluate(w.recipe, _no_read, graph.constants) for w in graph.weights if w.name in lookups}


def _no_read(name: str) -> np.ndarray:
    raise KeyError(name)


def _apply(region: Region, graph: Graph, tables: Env, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The region's output [n, heads, D] for x[n, heads, D] at positions[n]."""
    env: Env = {region.source: x.reshape(len(x), *graph.types[region.source].shape[1:]), "positions": positions}
    _ensure(region.end.out.name, env, graph, tables)
    return env[region.end.out.name].reshape(x.shape)


def _ensure(name: str, env: Env, graph: Graph, tables: Env) -> None:
    """Adds the value to `env`, and those that it needs. No closure: a cycle would keep every array until collected."""
    if name in env:
        return
    weight = graph.weight_by_name.get(name)
    if weight is not None:
        env[name] = tables[name] if name in tables else evaluate(weight.recipe, _no_read, graph.constants)
        return
    node = graph.producers[name]
    for i in node.inputs:
        _ensure(i, env, graph, tables)
    execute(node, env, graph)


def _probe(region: Region, graph: Graph, tables: Env, length: int) -> Rotation | None:
    """The rotation that the region computes, or None when it is none."""
    heads, dim = _heads(graph.types[region.source])
    rng = np.random.default_rng(0)
    some = np.unique(np.concatenate([[0, 1, length - 1], rng.integers(0, length, 13)])).astype(np.int32)
    some = some[some < length]
    maps = np.stack([_map_at(region, graph, tables, int(p), heads, dim) for p in some])
    support = np.abs(maps).max(axis=0) > 1e-7
    apart = _deals_apart(support, dim)
    pairs = _pairs(support[_apart(dim)] if apart else support, dim)
    if pairs is None or not _is_linear(region, graph, tables, maps, some, heads):
        return None
    half, interleaved = pairs
    cos, sin = _read_tables(region, graph, tables, length, heads, dim, half, interleaved, apart)
    found = Rotation(cos, sin, interleaved, apart)
    return found if _agrees(region, graph, tables, found, heads, dim, length) else None


def _apart(dim: int) -> np.ndarray:
    """Where, among halves, the elements of interleaved pairs went: 0, D/2, 1, D/2 + 1, ..."""
    return np.arange(dim).reshape(2, -1).T.reshape(-1)


def _deals_apart(support: np.ndarray, dim: int) -> bool:
    """Whether the whole head is read by neighbours and written by halves."""
    if dim % 2 or support.diagonal().all():
        return False
    neighbours = np.kron(np.eye(dim // 2, dtype=bool), np.ones((2, 2), bool))
    return not (support[_apart(dim)] & ~neighbours).any()


def _map_at(region: Region, graph: Graph, tables: Env, position: int, heads: int, dim: int) -> np.ndarray:
    """The matrix [out, in] of the first head at one position, by the basis."""
    x = np.zeros((dim, heads, dim), np.float32)
    x[np.arange(dim), :, np.arange(dim)] = 1
    return _apply(region, graph, tables, x, np.full(dim, position, np.int32))[:, 0].T


def _pairs(support: np.ndarray, dim: int) -> tuple[int, bool] | None:
    """Half the rotated width and the pairing, when row j of the support is {j} or a rotation's {j, partner}."""
    if support.sum(axis=1).max() > 2 or not support.diagonal().all():
        return None
    partner = np.array([next((int(k) for k in np.flatnonzero(row) if k != j), -1) for j, row in enumerate(support)])
    half = int((partner >= 0).sum()) // 2
    if half == 0:
        return None
    i = np.arange(half)
    for interleaved, a, b in ((False, i, i + half), (True, 2 * i, 2 * i + 1)):
        if max(a.max(), b.max()) < dim and (partner[a] == b).all() and (partner[b] == a).all():
            return half, interleaved
    return None


def _is_linear(region: Region, graph: Graph, tables: Env, maps: np.ndarray, positions: np.ndarray, heads: int) -> bool:
    """Random heads must go through the first head's map, each alone."""
    x = np.random.default_rng(1).standard_normal((len(positions), heads, maps.shape[2])).astype(np.float32)
    y = _apply(region, graph, tables, x, positions)
    return bool(np.allclose(y, np.einsum("poi,phi->pho", maps, x), rtol=1e-4, atol=1e-4))


def _read_tables(
    region: Region,
    graph: Graph,
    tables: Env,
    length: int,
    heads: int,
    dim: int,
    half: int,
    interleaved: bool,
    apart: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin at every position: the images of the first members of the pairs."""
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    cos, sin = np.empty((2, length, half), np.float32)
    step = max(1, _CHUNK // (heads * dim))
    for start in range(0, length, step):
        positions = np.arange(start, min(start + step, length), dtype=np.int32)
        x = np.zeros((len(positions), heads, dim), np.float32)
        x[..., first] = 1
        y = _apply(region, graph, tables, x, positions)[:, 0]
        y = y[:, _apart(dim)] if apart else y
        cos[positions], sin[positions] = y[:, first], y[:, second]
    return cos, sin


def _agrees(region: Region, graph: Graph, tables: Env, found: Rotation, heads: int, dim: int, length: int) -> bool:
    """The op with these tables gives what the region gives, at random positions and on random heads."""
    from planc.compiler.ir.refs import rotary as reference

    rng = np.random.default_rng(2)
    positions = rng.integers(0, length, 32).astype(np.int32)
    x = rng.standard_normal((32, heads, dim)).astype(np.float32)
    (y,) = reference({"interleaved": found.interleaved}, (x, found.cos, found.sin, positions), ())
    want = _apply(region, graph, tables, x, positions)
    return bool(np.allclose(y, want[..., _apart(dim)] if found.apart else want, rtol=1e-5, atol=1e-5))
