"""The choice of tiles: in goes a GPU and what was measured on it, out comes the tile of each product, with its time.

The one place that chooses. What was measured goes before what the cost model says, and is held to the same rules.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from planc.codegen.cuda import dense_tiles
from planc.codegen.cuda.call import arch_of
from planc.codegen.cuda.cost import Cost, cost
from planc.codegen.skus import SKU, skus
from planc.codegen.target import Target, parse
from planc.errors import UsageError
from planc.plans import schema
from planc.plans.tuning import Entry, Product, Tile, Tuning

# Times so close are one: the first tile of the list is then taken, which buckets and GPUs share.
_EQUAL = 1.05
_BUSY = 0.9  # share of SMs with work that is as good as all
# Whose figures choose where a target names an SM alone: the one of it that most data centres have.
_DEFAULT = {80: "a100-80g", 86: "a10", 89: "l40s", 90: "h100-sxm", 100: "b200", 120: "rtx-pro-6000", 121: "gb10"}


@dataclass(frozen=True)
class Choice:
    """A product's tile and what it should take; `measured` where a tuning file says so."""

    product: Product
    tile: Tile
    cost: Cost
    measured: bool = False


class Tiles:
    """Chooses for one GPU. `fixed` are the tiles of products that are settled."""

    def __init__(self, gpu: SKU, fixed: Mapping[Product, Tile] | None = None) -> None:
        self.gpu, self._fixed = gpu, fixed or {}
        self._chosen: dict[Product, Choice] = {}

    @staticmethod
    @lru_cache
    def default(sm: int) -> "Tiles":
        """For an SM that no GPU is named of. PlancError when kernels are made for none."""
        arch_of(sm)
        return Tiles(default_gpu(sm))

    def choose(self, p: Product) -> Choice:
        """The tile of a product."""
        if p not in self._chosen:
            tile = self._fixed.get(p)
            self._chosen[p] = best(self.ranked(p)) if tile is None else Choice(p, tile, cost(self.gpu, p, tile), True)
        return self._chosen[p]

    def ranked(self, p: Product) -> tuple[Choice, ...]:
        """Every candidate, in the order of preference."""
        tiles = dense_tiles.candidates(arch_of(self.gpu.sm.number), p)
        return tuple(Choice(p, tile, cost(self.gpu, p, tile)) for tile in tiles)

    def with_tile(self, p: Product, tile: Tile) -> "Tiles":
        """The same, with the tile of one product settled."""
        return Tiles(self.gpu, {**self._fixed, p: tile})


def best(choices: Iterable[Choice]) -> Choice:
    """Of those that take the least time, or as good as that, the first that has work for most SMs."""
    found = list(choices)
    least = min(c.cost.work for c in found)
    equal = [c for c in found if c.cost.work <= least * _EQUAL]
    return max(equal, key=lambda c: min(c.cost.busy, _BUSY))


def default_gpu(sm: int) -> SKU:
    """The GPU whose figures stand for an SM."""
    return skus()[_DEFAULT[sm]]


def name_of(target: Target) -> str:
    """A target as tuning files spell it: the GPU that was named, else the SM."""
    return target.sku or target.arch


def tiles_for(target: Target, tuning: Tuning | None = None) -> Tiles:
    """What chooses for a CUDA target. UsageError names an entry of the tuning file that may not be used."""
    name = name_of(target)
    for entry in tuning.entries if tuning else ():
        if entry.target == name:
            _check(entry, target)
    return Tiles(target.gpu or default_gpu(target.sm.number), tuning.of(name) if tuning else None)


def tiles_of(plan: schema.Plan) -> Tiles:
    """What chooses as a plan's build did, whatever the cost model says today."""
    target = parse(plan.target)
    return Tiles(target.gpu or default_gpu(target.sm.number), {row.product: row.tile for row in plan.tiles})


def _check(entry: Entry, target: Target) -> None:
    p = entry.product
    if p.weight not in dense_tiles.WEIGHTS or p.x not in dense_tiles.ROWS or min(p.n, p.k, p.rows) < 1:
        raise UsageError(f"the tuning file's entry for {p} on {entry.target} names no product; planc tune writes them.")
    why = dense_tiles.wrong(arch_of(target.sm.number), p, entry.tile)
    if why:
        raise UsageError(f"the tuning file's entry for {entry}: {why}.")
