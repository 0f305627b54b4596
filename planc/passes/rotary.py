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
from planc.compiler.ir.types import TensorType
from planc.passes.options import Options
from planc.passes.util import const_weight, is_constant, order

_LINEAR = {"mul", "add", "sub", "neg", "concat", "slice", "reshape", "transpose", "copy"}
_MOVES = {"concat", "slice", "reshape", "transpose", "neg", "copy"}
_CHUNK = 1 << 21  # elements of one probe: bounds its memory


@dataclass(frozen=True)
class Region:
    """Nodes from `source` to `end`, in order; both are [T, heads, D], or [T, D] when there is one head."""

    source: str
    end: Node
    nodes: tuple[Node, ...]


def rotary(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Replaces each rotation by one op; counts them."""
    replaced: dict[Node, list[Node]] = {}
    weights: list[Weight] = []
    constants: dict[str, np.ndarray] = {}
    cache: dict[object, tuple[np.ndarray, np.ndarray, bool] | None] = {}
    tables = _tables(graph)
    turning = {n.out.name for n in _rotating(graph)[0]}
    for end in ends(graph):
        region = _region(end, graph, turning)
        if region is None:
            continue
        key = _spelling(region, graph)
        if key not in cache:
            cache[key] = _probe(region, graph, tables, options.max_model_len)
        found = cache[key]
        if found is None:
            continue
        cos, cos_entry = const_weight(found[0], "cos")
        sin, sin_entry = const_weight(found[1], "sin")
        weights += [cos, sin]
        constants |= cos_entry | sin_entry
        replaced[end] = _rotated(region, cos.name, sin.name, found[2], graph)
    return graph.rewrite(dict(replaced), add_weights=weights, add_constants=constants), len(replaced)


def _rotated(region: Region, cos: str, sin: str, interleaved: bool, graph: Graph) -> list[Node]:
    """The op over [T, heads, D], with a reshape on either side that has no axis of heads."""
    end, source = region.end, graph.types[region.source]
    heads, dim = _heads(source)
    before, after, x, y = [], [], region.source, end.out
    if len(source.shape) == 2:
        attrs = {"shape": (-1, heads, dim)}
        wide = Value(f"{end.out.name}.heads", OPS["reshape"].infer(attrs, [source])[0])
        before, x = [Node("reshape", (x,), (wide,), tuple(attrs.items()), end.loc)], wide.name
    if len(end.out.type.shape) == 2:
        y = Value(f"{end.out.name}.rotary", TensorType("f32", (end.out.type.shape[0], heads, dim)))
        after = [Node("reshape", (y.name,), end.outputs, (("shape", (-1, dim)),), end.loc)]
    turned = Node("rotary", (x, cos, sin, "positions"), (y,), (("interleaved", interleaved),), end.loc)
    return [*before, turned, *after]


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
    index = order(graph)
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

    def ensure(name: str) -> None:
        if name in env:
            return
        if name in graph.weight_by_name:
            env[name] = (
                tables[name]
                if name in tables
                else evaluate(graph.weight_by_name[name].recipe, _no_read, graph.constants)
            )
            return
        n = graph.producers[name]
        for i in n.inputs:
            ensure(i)
        execute(n, env, graph)

    ensure(region.end.out.name)
    return env[region.end.out.name].reshape(x.shape)


def _probe(region: Region, graph: Graph, tables: Env, length: int) -> tuple[np.ndarray, np.ndarray, bool] | None:
    """cos and sin float32 [length, R/2] and whether pairs are interleaved, or None when the region is no rotation."""
    heads, dim = _heads(graph.types[region.source])
    rng = np.random.default_rng(0)
    some = np.unique(np.concatenate([[0, 1, length - 1], rng.integers(0, length, 13)])).astype(np.int32)
    some = some[some < length]
    maps = np.stack([_map_at(region, graph, tables, int(p), heads, dim) for p in some])
    pairs = _pairs(np.abs(maps).max(axis=0) > 1e-7, dim)
    if pairs is None or not _is_linear(region, graph, tables, maps, some, heads):
        return None
    half, interleaved = pairs
    cos, sin = _read_tables(region, graph, tables, length, heads, dim, half, interleaved)
    if not _agrees(region, graph, tables, (cos, sin, interleaved), heads, dim, length):
        return None
    return cos, sin, interleaved


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
    region: Region, graph: Graph, tables: Env, length: int, heads: int, dim: int, half: int, interleaved: bool
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
        cos[positions], sin[positions] = y[:, first], y[:, second]
    return cos, sin


def _agrees(
    region: Region,
    graph: Graph,
    tables: Env,
    found: tuple[np.ndarray, np.ndarray, bool],
    heads: int,
    dim: int,
    length: int,
) -> bool:
    """The op with these tables gives what the region gives, at random positions and on random heads."""
    from planc.compiler.ir.refs import rotary as reference

    rng = np.random.default_rng(2)
    positions = rng.integers(0, length, 32).astype(np.int32)
    x = rng.standard_normal((32, heads, dim)).astype(np.float32)
    (y,) = reference({"interleaved": found[2]}, (x, found[0], found[1], positions), ())
    return bool(np.allclose(y, _apply(region, graph, tables, x, positions), rtol=1e-5, atol=1e-5))
