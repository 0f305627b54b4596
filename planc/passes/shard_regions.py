"""Regions that can be split: in goes a graph and a value, out come all values that must be split with it, and how.

A region ends at products: those that make its values give each rank some columns, those that read them along the
summed axis give each rank a part of the sum. What lies between runs on parts alone, or the region stays whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.shards import Ranges
from planc.passes.shard_rules import Ends, Link, WholeError, even, joined, links

Place = tuple[str, int]  # a value and an axis of it


@dataclass
class Region:
    """`axes` are its values, weights among them; `columns` the products that make them, `sums` those that sum them up.

    `reads` are weights that a node takes with a part each, by the node and the weight.
    """

    start: Place
    axes: dict[str, int] = field(default_factory=dict)
    columns: list[Node] = field(default_factory=list)
    sums: list[Node] = field(default_factory=list)
    attentions: list[Node] = field(default_factory=list)
    reads: dict[tuple[Node, str], int] = field(default_factory=dict)

    def size(self, graph: Graph) -> int:
        """What the number of ranks must divide: query heads, or elements of the axis that is summed."""
        name, axis = self.start
        return int(graph.types[name].shape[axis])

    @property
    def what(self) -> str:
        """What `size` counts, for errors."""
        if self.attentions:
            return f"query heads of {self.attentions[0].loc or self.start[0]}"
        return f"inputs of {self.sums[0].loc or self.sums[0].out.name}"


def region(graph: Graph, start: Place) -> Region:
    """The region of a value. WholeError names the first op that needs a whole."""
    found = Region(start)
    todo = [start]
    while todo:
        name, axis = todo.pop()
        if name in found.axes:
            if found.axes[name] != axis:
                raise WholeError(f"%{name} would be split along two axes")
            continue
        found.axes[name] = axis
        if name in graph.weight_by_name:
            continue
        if name in graph.outputs or name not in graph.producers:
            raise WholeError(f"%{name} is no value of a layer")
        for n in _around(graph, name):
            todo += _through(n, graph, (name, axis), found)
    return found


def _around(graph: Graph, name: str) -> Iterator[Node]:
    yield graph.producers[name]
    yield from graph.users[name]


def _through(n: Node, graph: Graph, at: Place, found: Region) -> Iterator[Place]:
    """Where the split goes on, beyond a node; products and attentions are noted."""
    if n.op == "attention" and n not in found.attentions:
        found.attentions.append(n)
    for link in links(n, graph, *at):
        if isinstance(link, Ends):
            side = found.columns if link.columns else found.sums
            if n not in side:
                side.append(n)
            continue
        if link.optional:
            continue
        if link.value in graph.weight_by_name:
            found.reads[n, link.value] = link.axis
        yield link.value, link.axis


def parts(found: Region, graph: Graph, ranks: int) -> dict[str, Ranges]:
    """The parts of every value of a region. WholeError where they do not line up."""
    work = _Parts(found, graph)
    seeds = [n.inputs[0] for n in found.attentions] or [found.start[0]]
    for name in seeds:
        work.take(name, even(int(graph.types[name].shape[found.axes[name]]), ranks))
    work.run()
    for n in found.sums:
        _check_sum(n, work.known[n.inputs[0]])
    return {name: joined(ranges) for name, ranges in work.known.items()}


class _Parts:
    """Parts that are known, and go from value to value until all are."""

    def __init__(self, found: Region, graph: Graph) -> None:
        self.known: dict[str, Ranges] = {}
        self._found, self._graph = found, graph
        self._todo: list[str] = []
        self._pieces: dict[str, dict[str, Ranges]] = {}

    def take(self, name: str, ranges: Ranges) -> None:
        if name not in self.known:
            self.known[name] = ranges
            self._todo.append(name)
        elif joined(self.known[name]) != joined(ranges):
            raise WholeError(f"%{name} would be split in two ways")

    def run(self) -> None:
        while self._todo:
            name = self._todo.pop()
            if name in self._graph.weight_by_name:
                continue
            for n in _around(self._graph, name):
                for link in links(n, self._graph, name, self._found.axes[name]):
                    if isinstance(link, Ends) or link.value not in self._found.axes:
                        continue
                    if (moved := link.move(self.known[name])) is not None:
                        self._take_link(n, link, moved)
        missing = [name for name in self._found.axes if name not in self.known]
        if missing:
            raise WholeError(f"nothing says how %{missing[0]} is split")

    def _take_link(self, n: Node, link: Link, moved: Ranges) -> None:
        if not link.piece:
            self.take(link.value, moved)
            return
        pieces = self._pieces.setdefault(link.value, {})
        pieces[n.out.name] = moved
        readers = [u for u in self._graph.users[link.value] if u.op == "slice" and u.attr("axis") == link.axis]
        whole = [u for u in readers if u.out.name not in self._found.axes]
        if len(pieces) + len(whole) == len(readers) and link.value not in self.known:
            ends = [(int(u.attr("start")), int(u.attr("stop"))) for u in whole]  # type: ignore[arg-type]
            self.take(link.value, _union(link.value, [*pieces.values(), *(((e,),) * len(moved) for e in ends)]))


def _union(name: str, pieces: list[Ranges]) -> Ranges:
    """The parts of a value whose readers take slices of it, in its own order."""
    ordered = sorted(pieces, key=lambda ranges: ranges[0][0])
    ends = [(min(s for mine in p for s, _ in mine), max(e for mine in p for _, e in mine)) for p in ordered]
    if any(later[0] < earlier[1] for earlier, later in pairwise(ends)):
        raise WholeError(f"%{name} is read in slices that overlap")
    return tuple(tuple(pair for p in ordered for pair in p[r]) for r in range(len(ordered[0])))


def _check_sum(n: Node, ranges: Ranges) -> None:
    """Each element of a sum is one rank's."""
    pairs = sorted(pair for mine in ranges for pair in mine)
    if any(later[0] < earlier[1] for earlier, later in pairwise(pairs)):
        raise WholeError(f"{n.op} at {n.loc or 'top level'} would count elements twice")


def is_whole(ranges: Ranges, size: int) -> bool:
    """Whether every rank has all of an axis."""
    return all(mine == ((0, size),) for mine in ranges)
