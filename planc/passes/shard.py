"""linear(x, w) -> all_reduce(linear(x_r, w_r)): each rank's slice of what can be split, before anything is merged.

Products that feed each other are split by columns and then by rows, attention by heads, the head and the embedding by
the vocabulary. In this order no scale ever needs splitting. One rank is the identity. What ops allow is their `shard`
row in the op table; nothing here looks at a model's name. Where a region cannot run on parts it stays whole on every
rank, which is always right.
"""

from dataclasses import dataclass, field
from math import gcd

from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.shards import Ranges, ranks_of
from planc.errors import PlancError, UsageError
from planc.passes.options import Options
from planc.passes.shard_regions import Place, Region, is_whole, parts, region
from planc.passes.shard_rewrite import Splits, rewritten
from planc.passes.shard_rules import WholeError

_PRODUCTS = ("linear", "expert_linear")
_MOST = 64  # ranks that an error proposes


def shard(graph: Graph, options: Options) -> tuple[Graph, int]:
    """The graph that each rank runs; counts the products, tables and attentions that are split.

    UsageError for a number of ranks that does not divide what must be split, with those that do; PlancError when
    nothing of the model can be.
    """
    if options.tp == 1:
        return graph, 0
    regions = _regions(graph)
    _check_divides(regions, graph, options.tp)
    splits = Splits(options.tp)
    count = sum(_settle(found, graph, splits) for found in regions)
    count += _vocabulary(graph, splits)
    if not count:
        raise PlancError(f"nothing of this model can be split over {options.tp} ranks; build it with --tp 1.")
    return rewritten(graph, splits), count


def replicated(graph: Graph) -> tuple[str, ...]:
    """Modules of a sharded graph whose products every rank holds whole."""
    names = ("linear", "qlinear", "expert_linear", "qexpert_linear", "embedding", "qembedding")
    found: dict[str, None] = {}
    for n in graph.nodes:
        weights = [graph.weight_by_name[i] for i in n.inputs if i in graph.weight_by_name] if n.op in names else []
        loads = [w for w in weights if w.recipe.loads]
        if loads and all(ranks_of(w.recipe) == 1 for w in loads):
            found[n.loc or n.out.name] = None
    return tuple(found)


@dataclass
class _Search:
    """Regions as they are found: what one has taken is no other's."""

    graph: Graph
    found: list[Region] = field(default_factory=list)
    columns: set[Node] = field(default_factory=set)
    sums: set[Node] = field(default_factory=set)
    values: set[str] = field(default_factory=set)

    def try_(self, start: Place) -> None:
        if start[0] in self.values:
            return
        try:
            new = region(self.graph, start)
        except WholeError:
            return
        if (
            not new.columns
            or not new.sums
            or self.sums.intersection(new.columns)
            or self.columns.intersection(new.sums)
        ):
            return
        self.found.append(new)
        self.columns.update(new.columns)
        self.sums.update(new.sums)
        self.values.update(new.axes)


def _regions(graph: Graph) -> list[Region]:
    """Attentions first, then what products sum over, in graph order."""
    search = _Search(graph)
    for n in graph.nodes:
        if n.op == "attention":
            search.try_((n.inputs[0], 1))
    for n in graph.nodes:
        if n.op in _PRODUCTS and n not in search.sums:
            search.try_((n.inputs[0], len(graph.types[n.inputs[0]].shape) - 1))
    return search.found


def _check_divides(regions: list[Region], graph: Graph, ranks: int) -> None:
    if all(found.size(graph) % ranks == 0 for found in regions):
        return
    able = [found for found in regions if _fewest(found, graph)]
    wrong = [found for found in able if found.size(graph) % ranks]
    if not wrong:
        return  # the others stay whole at any number of ranks
    common = gcd(*(found.size(graph) for found in able))
    fits = [str(n) for n in range(1, min(common, _MOST) + 1) if common % n == 0]
    told = f"{' and '.join([', '.join(fits[:-1]), fits[-1]]) if len(fits) > 1 else fits[0]}"
    raise UsageError(
        f"--tp {ranks} does not divide the {wrong[0].size(graph)} {wrong[0].what}; "
        f"{told} divide{'s' if len(fits) == 1 else ''} all that is split in this model."
    )


def _fewest(found: Region, graph: Graph) -> int:
    """The least number of ranks that can take parts of a region; 0 when none can."""
    size = found.size(graph)
    for ranks in range(2, min(size, _MOST) + 1):
        try:
            if size % ranks == 0 and parts(found, graph, ranks):
                return ranks
        except WholeError:
            continue
    return 0


def _settle(found: Region, graph: Graph, splits: Splits) -> int:
    """Notes the parts of a region; counts its products and attentions, 0 when the parts do not line up."""
    try:
        known = parts(found, graph, splits.ranks)
    except WholeError:
        return 0
    for name, axis in found.axes.items():
        if not is_whole(known[name], int(graph.types[name].shape[axis])) and name not in graph.weight_by_name:
            splits.values[name] = (axis, known[name])
    splits.columns |= {n: known[n.out.name] for n in found.columns if n.out.name in splits.values}
    splits.sums |= {n: known[n.inputs[0]] for n in found.sums}
    splits.reads |= {(n.out.name, w): (axis, known[w]) for (n, w), axis in found.reads.items()}
    return len(found.columns) + len(found.sums) + len(found.attentions)


def _vocabulary(graph: Graph, splits: Splits) -> int:
    """The head, whose parts are gathered, and tables that token ids look up, whose rows are summed."""
    heads = _heads(graph) - {*splits.columns, *splits.sums}
    tables = [n for n in graph.nodes if n.op == "embedding" and n.inputs[1] == "ids" and _is_table(n, graph)]
    for n in (*heads, *tables):
        weight = n.inputs[1] if n in heads else n.inputs[0]
        rows = _overlapping(int(graph.types[weight].shape[0]), splits.ranks)
        (splits.heads if n in heads else splits.tables)[n] = rows
    return len(heads) + len(tables)


def _is_table(n: Node, graph: Graph) -> bool:
    weight = graph.weight_by_name.get(n.inputs[0])
    return weight is not None and bool(weight.recipe.loads) and len(weight.value.type.shape) == 2


def _overlapping(size: int, ranks: int) -> Ranges:
    """Parts of one size that cover an axis; where it does not divide, the last ones share some rows."""
    each = -(-size // ranks)
    starts = [min(r * each, size - each) for r in range(ranks)]
    return tuple(((start, start + each),) for start in starts)


def _heads(graph: Graph) -> set[Node]:
    """Products that the outputs are made of, with no other product between."""
    found: set[Node] = set()
    queue, seen = list(graph.outputs), set(graph.outputs)
    while queue:
        n = graph.producers.get(queue.pop())
        if n is None or n.op in ("embedding", "attention", "expert_linear", "matmul"):
            continue
        if n.op == "linear":
            found |= {n} if n.inputs[1] in graph.weight_by_name else set()
            continue
        new = [i for i in n.inputs if i not in seen]
        seen.update(new)
        queue += new
    return found
