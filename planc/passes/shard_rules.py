"""How a split moves through an op: in go a node and one of its values split along an axis, out come the others' splits.

The rule of an op is the `shard` of its row in the op table. A rule says where the split goes on, that it ends there (a
product makes or takes it), or that the op needs the whole.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd, prod

from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.shards import Ranges
from planc.compiler.ir.types import TensorType

Move = Callable[[Ranges], Ranges | None]  # None: the split says nothing about that value


class WholeError(Exception):
    """The op needs what would be split as a whole; the text says why."""


@dataclass(frozen=True)
class Link:
    """A value that is split too, its axis, and its parts from those of the value asked about. `piece`: these are only
    some of its parts, the other readers have others. `optional`: it may as well be taken whole."""

    value: str
    axis: int
    move: Move
    piece: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Ends:
    """A product at which the split ends: as the maker of its columns, or as a sum over its rows."""

    columns: bool


Rule = Callable[[Node, Graph, str, int], Iterator[Link | Ends]]


def links(n: Node, graph: Graph, name: str, axis: int) -> list[Link | Ends]:
    """What follows for the node's other values when `name`, one of its inputs or outputs, is split along `axis`.

    WholeError when the node cannot run on a part.
    """
    t = graph.types[name]
    if isinstance(t.shape[axis], str):
        raise WholeError(f"{_where(n)} would have its tokens split")
    return list(RULES[OPS[n.op].shard](n, graph, name, axis))


def even(size: int, ranks: int) -> Ranges:
    """Equal parts in order; `ranks` divides `size`."""
    each = size // ranks
    return tuple(((r * each, (r + 1) * each),) for r in range(ranks))


def joined(ranges: Ranges) -> Ranges:
    """The same parts, with neighbours made one where they are neighbours on every rank."""
    made: list[list[tuple[int, int]]] = [[] for _ in ranges]
    for pieces in zip(*ranges, strict=True):
        touching = all(mine and mine[-1][1] == piece[0] for mine, piece in zip(made, pieces, strict=True))
        for mine, piece in zip(made, pieces, strict=True):
            if touching:
                mine[-1] = (mine[-1][0], piece[1])
            else:
                mine.append(piece)
    return tuple(map(tuple, made))


def _where(n: Node) -> str:
    return f"{n.op} at {n.loc or 'top level'}"


def _same(ranges: Ranges) -> Ranges:
    return ranges


def _ndim(graph: Graph, name: str) -> int:
    return len(graph.types[name].shape)


def _elementwise(n: Node, graph: Graph, name: str, axis: int) -> Iterator[Link | Ends]:
    """All operands that have the axis at all, aligned at the last one as they broadcast."""
    back = _ndim(graph, name) - axis
    if graph.types[name].shape[axis] != n.out.type.shape[-back]:
        raise WholeError(f"{_where(n)} repeats a part")
    for other in (*n.inputs, *(v.name for v in n.outputs)):
        shape = graph.types[other].shape
        if back <= len(shape) and shape[-back] != 1:
            yield Link(other, len(shape) - back, _same)


def _rows(n: Node, graph: Graph, name: str, axis: int) -> Iterator[Link | Ends]:
    """Ops along the last axis, which take each vector by itself; parameters belong to that axis and stay whole."""
    count = _ndim(graph, n.out.name)
    if name in n.inputs and name != n.inputs[0] and _ndim(graph, name) != count:
        raise WholeError(f"{_where(n)} reads a table or parameters whole")
    if axis == count - 1:
        raise WholeError(f"{_where(n)} needs all of its last axis")
    for other in (*n.inputs, *(v.name for v in n.outputs)):
        shape = graph.types[other].shape
        if len(shape) == count and shape[axis] != 1:
            yield Link(other, axis, _same)


def _reshape(n: Node, graph: Graph, name: str, axis: int) -> Iterator[Link | Ends]:
    """The axis that begins at the same place, counted in rows of the features behind it."""
    other = n.out.name if name == n.inputs[0] else n.inputs[0]
    here, there = (_features(graph.types[v]) for v in (name, other))
    lead, inner = _outside(here, axis - _tokens(graph.types[name]))
    for i, size in enumerate(there):
        if size > 1 and _outside(there, i)[0] == lead:
            yield Link(name, axis, _same)
            yield Link(other, i + _tokens(graph.types[other]), _scaled(inner, _outside(there, i)[1], n))
            return
    raise WholeError(f"{_where(n)} mixes the axis with others")


def _tokens(t: TensorType) -> int:
    return int(isinstance(t.shape[0], str))


def _features(t: TensorType) -> list[int]:
    return [int(d) for d in t.shape[_tokens(t) :]]


def _outside(dims: list[int], axis: int) -> tuple[int, int]:
    """Elements of the axes before `axis`, and of those behind it."""
    return prod(dims[:axis]), prod(dims[axis + 1 :])


def _scaled(inner: int, other: int, n: Node) -> Move:
    """Bounds counted in units of `inner` elements as bounds in units of `other`."""

    def move(ranges: Ranges) -> Ranges:
        bounds = [b * inner for mine in ranges for pair in mine for b in pair]
        if any(b % other for b in bounds):
            raise WholeError(f"{_where(n)} has parts of {other} elements that would be taken apart")
        return tuple(tuple((s * inner // other, e * inner // other) for s, e in mine) for mine in ranges)

    return move


def _transpose(n: Node, graph: Graph, name: str, axis: int) -> Iterator[Link | Ends]:
    perm = n.attr("perm")
    assert isinstance(perm, tuple)
    made = perm.index(axis) if name == n.inputs[0] else axis
    yield Link(n.out.name, made, _same)
    yield Link(n.inputs[0], perm[made], _same)


def _slice(n: Node, graph: Graph, name: str, axis: int) -> Iterator[Link | Ends]:
    """Along the split axis: what the slice has of the parts, and the parts that its readers want of the whole."""
    if n.attr("axis") != axis:
        yield from (Link(v, axis, _same) for v in (n.inputs[0], n.out.name))
        return
    start, stop = int(n.attr("start")), int(n.attr("stop"))  # type: ignore[arg-type]
    if name == n.inputs[0]:
        yield Link(n.out.name, axis, lambda ranges: _between(ranges, start, stop, n), optional=True)
    else:
        yield Link(n.inputs[0], axis, lambda ranges: _shifted(ranges, start), piece=True)


def _shifted(ranges: Ranges, by: int) -> Ranges:
    return tuple(tuple((s + by, e + by) for s, e in mine) for mine in ranges)


def _between(ranges: Ranges, start: int, stop: int, n: Node) -> Ranges:
    kept = tuple(tuple((max(s, start), min(e, stop)) for s, e in mine if s < stop and e > start) for mine in ranges)
    sizes = {sum(e - s for s, e in mine) for mine in kept}
    if len(sizes) != 1 or 0 in sizes:
        raise WholeError(f"{_where(n)} is not in equal parts on all ranks")
    return _shifted(kept, -start)


def _concat(n: Node, graph: Graph, name: str, axis: int) -> Iterator[Link | Ends]:
    if n.attr("axis") == axis:
        raise WholeError(f"{_where(n)} joins along the axis")
    yield from (Link(v, axis, _same) for v in (*n.inputs, n.out.name))


def _expand(n: Node, graph: Graph, name: str, axis: int) -> Iterator[Link | Ends]:
    """A part of what is repeated is the same repeated less often."""
    yield Link(n.out.name, axis, _same)
    if graph.types[n.inputs[0]].shape[axis] == n.out.type.shape[axis]:
        yield Link(n.inputs[0], axis, _same)


def _take_rows(n: Node, graph: Graph, name: str, axis: int) -> Iterator[Link | Ends]:
    yield from (Link(v, axis, _same) for v in (n.inputs[0], n.out.name))


def _attention(n: Node, graph: Graph, name: str, axis: int) -> Iterator[Link | Ends]:
    """Heads; each rank has the KV heads that its query heads look at, some of them on several ranks."""
    if axis != (0 if name in n.inputs[3:] else 1):
        raise WholeError(f"{_where(n)} needs its heads whole")
    q, k, v = n.inputs[:3]
    query = name not in (k, v)
    yield from (Link(i, 1, _same if query else _unknown) for i in (q, n.out.name))
    yield from (Link(i, 0, _same if query else _unknown) for i in n.inputs[3:])
    heads, kv_heads = (int(graph.types[i].shape[1]) for i in (q, k))
    if kv_heads > 1:  # one head is on every rank, whatever it is made of
        yield from (Link(i, 1, _kv_of(heads // kv_heads) if query else _same) for i in (k, v))


def _unknown(ranges: Ranges) -> None:
    return None


def _kv_of(group: int) -> Move:
    """The KV heads of query heads: one for each run of them that shares it on every rank."""

    def move(ranges: Ranges) -> Ranges:
        run = gcd(group, *(bound for mine in ranges for pair in mine for bound in pair))
        return tuple(
            tuple((at // group, at // group + 1) for s, e in mine for at in range(s, e, run)) for mine in ranges
        )

    return move


def _product(n: Node, graph: Graph, name: str, axis: int, weight: int) -> Iterator[Link | Ends]:
    if n.inputs[weight] not in graph.weight_by_name or name not in (n.inputs[0], n.out.name):
        raise WholeError(f"{_where(n)} needs %{name} whole")
    last = axis == _ndim(graph, name) - 1
    if last:
        yield Ends(columns=name == n.out.name)
    elif weight == 1:
        yield from (Link(v, axis, _same) for v in (n.inputs[0], n.out.name))
    else:
        raise WholeError(f"{_where(n)} needs all of its slots")


def _linear(n: Node, graph: Graph, name: str, axis: int) -> Iterator[Link | Ends]:
    return _product(n, graph, name, axis, 1)


def _experts(n: Node, graph: Graph, name: str, axis: int) -> Iterator[Link | Ends]:
    return _product(n, graph, name, axis, 2)


def _weighted_sum(n: Node, graph: Graph, name: str, axis: int) -> Iterator[Link | Ends]:
    made = axis if name == n.out.name else axis - 1
    if name == n.inputs[1] or made < 1:
        raise WholeError(f"{_where(n)} needs all of its slots")
    yield Link(n.inputs[0], made + 1, _same)
    yield Link(n.out.name, made, _same)


def _whole(n: Node, graph: Graph, name: str, axis: int) -> Iterator[Link | Ends]:
    raise WholeError(f"{_where(n)} has no rule for parts")


RULES: Mapping[str, Rule] = {
    "elementwise": _elementwise,
    "rows": _rows,
    "reshape": _reshape,
    "transpose": _transpose,
    "slice": _slice,
    "concat": _concat,
    "expand": _expand,
    "take_rows": _take_rows,
    "heads": _attention,
    "linear": _linear,
    "experts": _experts,
    "weighted_sum": _weighted_sum,
    "vocab": _whole,
    "replicate": _whole,
}
