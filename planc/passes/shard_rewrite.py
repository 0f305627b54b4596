"""Writes a split down: in goes a graph of whole values and the parts that ranks take, out comes the graph of a rank.

Weights become `shard` steps of their recipes; sums over parts become all_reduce, as late as one reader allows; a bias
is added by the first rank alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from planc.compiler.ir.graph import Graph, Node, Value, Weight
from planc.compiler.ir.recipe import Recipe, cast, constant, infer, step
from planc.compiler.ir.shards import Ranges
from planc.compiler.ir.shards import shard as sharded
from planc.compiler.ir.types import Attr, TensorType

_WEIGHT = {"linear": 1, "expert_linear": 2}
_MOVES = frozenset({"reshape", "slice", "transpose", "copy", "take_rows"})  # each element of the result is one of x


@dataclass
class Splits:
    """What each rank takes. `values` are split along an axis; `columns` and `sums` are products whose result, or whose
    input, is; `heads` and `tables` are split by rows of their weight; `reads` are weights beside a split value.
    """

    ranks: int
    values: dict[str, tuple[int, Ranges]] = field(default_factory=dict)
    columns: dict[Node, Ranges] = field(default_factory=dict)
    sums: dict[Node, Ranges] = field(default_factory=dict)
    heads: dict[Node, Ranges] = field(default_factory=dict)
    tables: dict[Node, Ranges] = field(default_factory=dict)
    reads: dict[tuple[str, str], tuple[int, Ranges]] = field(default_factory=dict)


def rewritten(graph: Graph, splits: Splits) -> Graph:
    """The graph that every rank runs, on its parts."""
    edit = _Edit(graph, splits)
    nodes = [made for n in graph.nodes for made in edit.node(n)]
    weights = {w.name: w for w in (*graph.weights, *edit.weights.values())}
    whole = replace(graph, nodes=tuple(nodes), weights=tuple(weights.values()))
    whole = replace(whole, constants={**graph.constants, **edit.constants})
    return _reduced(whole.without_dead(), edit.partial, splits.ranks).retyped()


class _Edit:
    """Nodes one by one, with the weights that they need. `partial` are values that each rank has a summand of."""

    def __init__(self, graph: Graph, splits: Splits) -> None:
        self._graph, self._splits = graph, splits
        self._made: dict[object, str] = {}
        self.weights: dict[str, Weight] = {}
        self.constants: dict[str, np.ndarray] = {}
        self.partial: set[str] = set()

    def node(self, n: Node) -> list[Node]:
        if n in self._splits.tables:
            return self._table(n, self._splits.tables[n])
        inputs = list(n.inputs)
        for i, name in enumerate(inputs):
            if n.outputs and (read := self._splits.reads.get((n.out.name, name))):
                inputs[i] = self._part(name, *read)
        if (rows := self._splits.columns.get(n) or self._splits.heads.get(n)) is not None:
            self._columns(n, inputs, rows)
        if (ranges := self._splits.sums.get(n)) is not None:
            self._sum(n, inputs, ranges)
        made = replace(n, inputs=tuple(inputs), attrs=tuple(self._attrs(n).items()))
        return self._gathered(made, self._splits.heads[n]) if n in self._splits.heads else [made]

    def _columns(self, n: Node, inputs: list[str], rows: Ranges) -> None:
        at = _WEIGHT[n.op]
        axis = len(self._graph.types[inputs[at]].shape) - 2
        inputs[at] = self._part(inputs[at], axis, rows)
        if n.attr("bias", False):
            inputs[-1] = self._part(inputs[-1], axis, rows)

    def _sum(self, n: Node, inputs: list[str], ranges: Ranges) -> None:
        at = _WEIGHT[n.op]
        axis = len(self._graph.types[inputs[at]].shape) - 1
        inputs[at] = self._part(inputs[at], axis, ranges)
        if n.attr("bias", False):
            inputs[-1] = self._first(inputs[-1])
        self.partial.add(n.out.name)

    def _gathered(self, n: Node, rows: Ranges) -> list[Node]:
        starts = tuple(mine[0][0] for mine in rows)
        part = replace(n.out, name=f"{n.out.name}.part")
        size = int(n.out.type.shape[-1])
        attrs: dict[str, Attr] = {"ranks": self._splits.ranks, "starts": starts, "size": size}
        gather = Node("all_gather", (part.name,), n.outputs, tuple(attrs.items()), n.loc)
        return [replace(n, outputs=(part,)), gather]

    def _table(self, n: Node, rows: Ranges) -> list[Node]:
        """Rows of the rank's part, zeros for ids that others have. Of rows on two ranks, the first has them."""
        name, count = n.out.name, rows[0][0][1] - rows[0][0][0]
        first, skip = self._table_places(rows)
        table = self._part(n.inputs[0], 0, rows)
        ids, mask, made = TensorType("i32", ("T",)), TensorType("f32", ("T",)), n.out.type
        steps: list[tuple[str, tuple[str, ...], str, TensorType, dict[str, Attr]]] = [
            ("sub", (n.inputs[1], first), f"{name}.id", ids, {}),
            ("maximum", (f"{name}.id", skip), f"{name}.low", ids, {}),
            ("minimum", (f"{name}.low",), f"{name}.row", ids, {"scalar": count - 1}),
            ("eq", (f"{name}.id", f"{name}.row"), f"{name}.is_own", mask, {}),
            ("reshape", (f"{name}.is_own",), f"{name}.mask", TensorType("f32", ("T", 1)), {"shape": (-1, 1)}),
            ("embedding", (table, f"{name}.row"), f"{name}.rows", made, {}),
            ("mul", (f"{name}.rows", f"{name}.mask"), name, made, {}),
        ]
        self.partial.add(name)
        return [Node(op, i, (Value(out, t),), tuple(a.items()), n.loc) for op, i, out, t, a in steps]

    def _table_places(self, rows: Ranges) -> tuple[str, str]:
        """Of each rank, its first row's id, and how many of its rows an earlier rank has too."""
        starts = [mine[0][0] for mine in rows]
        ends = [0, *(mine[0][1] for mine in rows[:-1])]
        shared = [max(end - start, 0) for start, end in zip(starts, ends, strict=True)]
        return self._by_rank("first", starts), self._by_rank("shared", shared)

    def _by_rank(self, what: str, numbers: list[int]) -> str:
        recipe, entry = constant(np.asarray(numbers, np.int32))
        self.constants |= entry
        made = sharded(recipe, 0, tuple(((r, r + 1),) for r in range(len(numbers))))
        return self._add(f"{what}.{next(iter(entry))}", made)

    def _part(self, name: str, axis: int, ranges: Ranges) -> str:
        """Each rank's part of a weight, made once."""
        key = (name, axis, ranges)
        if key not in self._made:
            recipe = sharded(self._graph.weight_by_name[name].recipe, axis, ranges)
            self._made[key] = self._add(f"{name}.split", recipe)
        return self._made[key]

    def _first(self, name: str) -> str:
        """The weight on the first rank, zeros on the others: sums over ranks have it once."""
        if name not in self._made:
            recipe = cast(self._graph.weight_by_name[name].recipe, "f32")
            shape = tuple(int(d) for d in infer(recipe).shape)
            zeros, entry = constant(np.zeros((1, *shape), np.float32))
            self.constants |= entry
            both: Recipe = step("concat", step("reshape", recipe, shape=(1, *shape)), zeros, axis=0)
            rows = tuple(((int(r > 0), int(r > 0) + 1),) for r in range(self._splits.ranks))
            self._made[name] = self._add(f"{name}.once", step("reshape", sharded(both, 0, rows), shape=shape))
        return self._made[name]

    def _add(self, name: str, recipe: Recipe) -> str:
        """A weight of that name; of a weight split in two ways, the second gets a number."""
        free, count = name, 1
        while free in self.weights and self.weights[free].recipe != recipe:
            count += 1
            free = f"{name}{count}"
        self.weights[free] = Weight(Value(free, infer(recipe)), recipe)
        return free

    def _attrs(self, n: Node) -> dict[str, Attr]:
        """The attributes for parts: shapes, and where slices begin."""
        attrs = dict(n.attrs)
        split = self._splits.values.get(n.out.name) if n.outputs else None
        if n.op in ("reshape", "expand") and split:
            shape, (axis, ranges) = attrs["shape"], split
            assert isinstance(shape, tuple)
            attrs["shape"] = (*shape[:axis], _size(ranges), *shape[axis + 1 :])
        whole = self._splits.values.get(n.inputs[0]) if n.op == "slice" else None
        if whole and whole[0] == attrs["axis"]:
            attrs["start"], attrs["stop"] = _local(whole[1], int(attrs["start"]), int(attrs["stop"]))  # type: ignore[arg-type]
        return attrs


def _size(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges[0])


def _local(ranges: Ranges, start: int, stop: int) -> tuple[int, int]:
    """Where a slice of the whole lies among a rank's parts."""
    before = sum(max(0, min(e, start) - s) for s, e in ranges[0] if s < start)
    inside = sum(min(e, stop) - max(s, start) for s, e in ranges[0] if s < stop and e > start)
    return before, before + inside


def _reduced(graph: Graph, partial: set[str], ranks: int) -> Graph:
    """An all_reduce behind each sum: behind what follows it, where that is a sum over ranks itself."""
    behind = _behind(graph, partial)
    nodes: list[Node] = []
    for n in graph.nodes:
        if not n.outputs or n.out.name not in behind:
            nodes.append(n)
            continue
        part = replace(n.out, name=f"{n.out.name}.part")
        nodes += [replace(n, outputs=(part,)), Node("all_reduce", (part.name,), n.outputs, (("ranks", ranks),), n.loc)]
    return replace(graph, nodes=tuple(nodes))


def _behind(graph: Graph, partial: set[str]) -> set[str]:
    """The values that are to be summed over the ranks."""
    open_ = set(partial)
    for n in graph.nodes:
        given = {i for i in n.inputs if i in open_ and len(graph.users[i]) == 1 and i not in graph.outputs}
        if given and _carries(n, given):
            open_ -= given
            open_.add(n.out.name)
    return open_


def _carries(n: Node, given: set[str]) -> bool:
    """Whether the node of summands is a summand of the node of sums."""
    scalar: Mapping[str, Attr] = dict(n.attrs)
    if n.op in ("add", "sub"):
        return len(n.inputs) == 2 and set(n.inputs) == given
    if n.op in ("mul", "div"):
        return "scalar" in scalar and not scalar.get("reversed", False)
    return n.op in (*_MOVES, "weighted_sum") and given == {n.inputs[0]}
