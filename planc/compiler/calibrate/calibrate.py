"""Runs the text through the graph and searches as it goes: what a search needs is dropped once it is done.

A norm, a gated activation or values of attention give their scales to all products that read them; where one of these
is not known to keep a factor apart, or a checkpoint holds its codes already, the product is rounded as it is.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planc.compiler.calibrate import search
from planc.compiler.calibrate.run import Weights, run, stretches
from planc.compiler.calibrate.search import Key
from planc.compiler.calibrate.stats import Collector, Stats
from planc.compiler.calibrate.text import CalibrationText
from planc.compiler.ir.graph import Graph, Node
from planc.compiler.progress import Progress
from planc.compiler.source.base import ModelSource
from planc.errors import PlancError
from planc.passes.choices import Choices
from planc.passes.migrate import rows_factor
from planc.passes.options import Options
from planc.passes.pipeline import PIPELINE
from planc.passes.pipeline import run as run_passes
from planc.passes.sites import PRODUCTS, Site, sites, weight_of
from planc.plans import schema


@dataclass(frozen=True)
class Calibration:
    """The choices, how many products were calibrated, and of these the ones whose input takes no scale, by place."""

    choices: Choices
    products: int
    unscaled: tuple[str, ...]


def calibrate(
    graph: Graph, source: ModelSource, options: Options, text: CalibrationText, progress: Progress
) -> Calibration:
    """Choices for the products of `graph` (before `migrate`) whose scheme calibration can help.

    PlancError names a weight or an activation that holds NaN or infinity.
    """
    wanted = _wanted(graph, options)
    if not wanted:
        return Calibration(Choices(), 0, ())
    closed = [n for n in graph.nodes if n.op in PRODUCTS and _native(n, graph, options)]
    work = _Work(graph, wanted, closed, Weights(graph, source.read, source.read_rows), len(text.windows))
    bar = progress.rows("calibration", len(wanted))
    for _ in run(graph, text.windows, stretches(graph, wanted), work.weights, work.see):
        work.search(bar)
    return Calibration(work.choices(), len(wanted), work.unscaled)


def calibrate_model(
    lifted: Graph, source: ModelSource, options: Options, text: Callable[[int], CalibrationText], progress: Progress
) -> tuple[Choices, schema.Calibration | None]:
    """The choices for a lifted model, and what its manifest says; nothing where no scheme profits.

    `text` is asked for, by the longest window, only where one does.
    """
    if not any(map(search.profiting, options.storage.said)):
        return Choices(), None  # before any pass is run for it
    first = [p.name for p in PIPELINE].index("migrate")
    graph, _ = run_passes(lifted, options, pipeline=PIPELINE[:first])
    if not _wanted(graph, options):
        return Choices(), None
    given = text(options.max_model_len)
    found = calibrate(graph, source, options, given, progress)
    sums = (found.products, len(found.choices.scales), found.unscaled)
    return found.choices, schema.Calibration(given.name, given.sha256, given.tokens, *sums)


def _wanted(graph: Graph, options: Options) -> list[Node]:
    """Not those that share their weight: its ranges would be those of one of them."""
    found = [n for n in graph.nodes if n.op in PRODUCTS and search.scheme_of(n) and not _native(n, graph, options)]
    readers = Counter(weight_of(n) for n in found)
    return [n for n in found if readers[weight_of(n)] == 1]


def _native(n: Node, graph: Graph, options: Options) -> bool:
    """Whether the checkpoint holds the product's very codes, which must stay."""
    weight = graph.weight_by_name.get(weight_of(n))
    return weight is not None and any(name in options.storage.native for name in weight.recipe.loads)


class _Work:
    """The inputs that were seen and not yet searched, and what was found."""

    def __init__(
        self, graph: Graph, wanted: list[Node], closed: Sequence[Node], weights: Weights, windows: int
    ) -> None:
        self.weights = weights
        self._windows = windows
        self._waiting = {n.out.name: n for n in wanted}
        self._sites = [s for s in sites(graph) if self._open(s, closed)]
        self._site_of = {r.node.out.name: (s, r.units) for s in self._sites for r in s.readers}
        self._first: dict[Key, str] = {}  # input -> the product that it is collected for
        self._collected: dict[Key, Collector] = {}
        self._seen: set[str] = set()
        self._scales: dict[str, np.ndarray] = {}
        self._clips: dict[str, np.ndarray] = {}
        self._offsets: dict[str, np.ndarray] = {}
        self._shifts: dict[str, np.ndarray] = {}
        self._outliers: dict[str, np.ndarray] = {}
        scalable = [n for n in wanted if search.scales_help(n)]
        self.unscaled = tuple(n.loc or n.out.name for n in scalable if n.out.name not in self._site_of)

    def see(self, n: Node, x: np.ndarray) -> None:
        """Takes the input of a product for one window."""
        if n.out.name not in self._waiting:
            return
        self._seen.add(n.out.name)
        key = search.key(n)
        if self._first.setdefault(key, n.out.name) != n.out.name:
            return
        if key not in self._collected:
            assert key[1] is not None, "only products whose scheme calibration can help wait for it"
            self._collected[key] = Collector(x.shape[-1], self._windows, key[1])
        self._collected[key].add(x)
        if not self._collected[key].finite():
            raise PlancError(f"calibration: what {n.loc or n.out.name} reads holds NaN or infinity (%{n.inputs[0]}).")

    def search(self, bar: Callable[[int], None]) -> None:
        """Searches for the products that were seen, and with them all that read the same site."""
        ready = [n for name, n in self._waiting.items() if name in self._seen and self._complete(name)]
        stats = {search.key(n): self._collected[search.key(n)].done() for n in ready}
        for site in {s.name: s for n in ready if (s := self._site_of.get(n.out.name, _NONE)[0])}.values():
            found = search.scales(site, stats, self.weights)
            if found is not None:
                self._scales[site.name] = found
        for n in ready:
            self._round(n, stats)
            del self._waiting[n.out.name]
            bar(1)
        still = {search.key(n) for n in self._waiting.values()}
        self._collected = {k: c for k, c in self._collected.items() if k in still}

    def choices(self) -> Choices:
        """The scales, and the ranges and offsets as they are once makers have taken 1 / s."""
        clips, offsets = dict(self._clips), dict(self._offsets)
        for site in self._sites:
            if site.rows is None or site.name not in self._scales:
                continue
            name, out = weight_of(site.maker), site.maker.out.name
            factor = rows_factor(site, self._scales[site.name], int(site.maker.out.type.shape[-1]))
            for found, key in ((clips, name), (offsets, out)):
                found |= {key: found[key] * factor} if key in found else {}
        return Choices(self._scales, clips, offsets, self._shifts, self._outliers)

    def _open(self, site: Site, closed: Sequence[Node]) -> bool:
        """Whether a scale would help a reader, and no weight that must stay would change."""
        if site.maker in closed or any(r.node in closed for r in site.readers):
            return False
        return any(r.node.out.name in self._waiting and search.scales_help(r.node) for r in site.readers)

    def _complete(self, name: str) -> bool:
        """Whether all products were seen that read the same site as this one."""
        site = self._site_of.get(name, _NONE)[0]
        mine = [r.node.out.name for r in site.readers] if site else []
        return all(r in self._seen for r in mine if r in self._waiting)

    def _round(self, n: Node, stats: dict[Key, Stats]) -> None:
        site, units = self._site_of.get(n.out.name, _NONE)
        inputs = stats[search.key(n)]
        s = self._scales.get(site.name) if site else None
        factor = np.ones_like(inputs.mean) if s is None else s[units]
        name = weight_of(n)
        for choose, kept in ((search.clips, self._clips), (search.shift, self._shifts)):
            if (found := choose(n, inputs, self.weights, factor)) is not None:
                kept[name], offset = found
                self._offsets |= {n.out.name: offset} if offset.any() else {}
        shift = self._shifts.get(name)
        users = self.weights.graph.users[name]
        whole = any(user.op == "embedding" for user in users)  # which reads rows of the weight as they are
        chosen = None if whole else search.outliers(n, inputs, self.weights, shift)
        bounds = search.ranges(n, inputs, self.weights, factor, shift, chosen)
        self._outliers |= {} if chosen is None else {name: chosen}
        self._clips |= {} if bounds is None else {name: bounds}


_NONE: tuple[Site | None, np.ndarray] = (None, np.empty(0, int))
