"""Chooses the scales of a site and the ranges of a weight: in go a graph's products and their inputs, out come choices.

Scales are judged together for all products that read a site, each with the error that its own scheme makes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from planc.compiler.calibrate import awq, float8, smooth
from planc.compiler.calibrate.run import Weights
from planc.compiler.calibrate.stats import Stats, rounded
from planc.compiler.ir.graph import Node
from planc.compiler.ir.quant import SCHEMES, Scheme
from planc.passes.sites import Reader, Site, weight_of

ROWS = 512  # rows of a weight that judge scales
STACK = 4  # matrices of a stack that do
WORTH = 0.95  # of the energy: a shift is kept that leaves less
STANDS_OUT = 2  # times what as many features give on average: so much outliers give at least
MOST = 8  # one in so many features may be an outlier, for a quarter more codes
BETTER = 0.98  # scales are kept that lower the error by more than what chance may
Key = tuple[str, Scheme | None]


@dataclass(frozen=True)
class _Product:
    """A product as the search of scales sees it: some rows of w f32[n, K]."""

    w: Tensor
    units: np.ndarray
    stats: Stats
    scheme: Scheme

    def error(self, s: np.ndarray) -> float:
        factor = torch.from_numpy(s[self.units])
        if self.stats.sample is not None:
            return smooth.error(self.w, torch.from_numpy(self.stats.sample), factor)
        return awq.error(self.w * factor, awq.scaled_gram(self.stats, s[self.units]), self.scheme)


def scheme_of(n: Node) -> Scheme | None:
    """The scheme that a product's weight will be stored in, when calibration can help it."""
    return profiting(str(n.attr("store", "")))


def profiting(name: str) -> Scheme | None:
    """The scheme of a storage's name, when calibration can help it."""
    row = SCHEMES.get(name)
    return row if row and (row.zeros or row.act) else None


def scales_help(n: Node) -> bool:
    """Whether codes of a product's scheme lie at equal steps, so that it matters which features share a scale."""
    row = scheme_of(n)
    return row is not None and not row.is_float


def key(n: Node) -> Key:
    """By what the statistics of a product's input go: its name, and the product's scheme."""
    return n.inputs[0], scheme_of(n)


def scales(site: Site, stats: Mapping[Key, Stats], weights: Weights) -> np.ndarray | None:
    """The best scales of a site, f32[size]; None when none is clearly better than 1."""
    products = [p for r in site.readers for p in _products(r, stats, weights)]
    best = sum(p.error(np.ones(site.size, np.float32)) for p in products) * BETTER
    chosen = None
    for s in _candidates(site.size, products):
        total = float(f"{sum(p.error(s) for p in products):.6g}")  # what the order of additions changes must not count
        if total < best:
            best, chosen = total, s
    return chosen


def _products(reader: Reader, stats: Mapping[Key, Stats], weights: Weights) -> Iterator[_Product]:
    row = scheme_of(reader.node)
    if row is None or not scales_help(reader.node):
        return
    for w in weights.matrices(weight_of(reader.node), STACK):
        at = np.unique(np.linspace(0, len(w) - 1, min(ROWS, len(w))).astype(int))
        yield _Product(torch.from_numpy(w[at]), reader.units, stats[key(reader.node)], row)


def _candidates(size: int, products: list[_Product]) -> Iterator[np.ndarray]:
    if any(p.scheme.zeros for p in products):
        mean = np.maximum.reduce([_by_unit(p.stats.size, p.units, size, np.add) / _count(p, size) for p in products])
        yield from awq.candidates(mean)
    if any(p.stats.sample is not None for p in products):
        peak, most = (
            np.maximum.reduce([_by_unit(x(p), p.units, size, np.maximum) for p in products])
            for x in (lambda p: p.stats.peak, lambda p: p.w.abs().amax(0).numpy())
        )
        yield from smooth.candidates(peak, most)


def _by_unit(x: np.ndarray, units: np.ndarray, size: int, gather: np.ufunc) -> np.ndarray:
    out = np.zeros(size)
    gather.at(out, units, x)
    return out


def _count(p: _Product, size: int) -> np.ndarray:
    return np.maximum(np.bincount(p.units, minlength=size), 1)


def clips(n: Node, stats: Stats, weights: Weights, s: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The largest |w * s| to keep of each group of a channel, [.., K/g, N], and what rounding takes from the results
    for the mean of the inputs, [.., N]; None for a scheme without groups.
    """
    row = scheme_of(n)
    if row is None or not row.zeros:
        return None
    gram = awq.scaled_gram(stats, s)
    made = [awq.clips(w * s, gram, stats.mean / s, row) for w in weights.matrices(weight_of(n))]
    kept, lost = (np.stack(parts) for parts in zip(*made, strict=True))
    return (kept, lost) if _stacked(n, weights) else (kept[0], lost[0])


def shift(n: Node, stats: Stats, weights: Weights, s: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """For a scheme whose activations are floats: the mean of x / s, f32[K], which rows lose before they are rounded,
    and what the results gain for it, f32[.., N]. None where that leaves nearly as much to round.

    A float's rounding error is a share of what is rounded, and what the mean gives is exact.
    """
    if scales_help(n):
        return None
    squares, offsets = np.zeros(len(stats.mean)), []
    for w in weights.matrices(weight_of(n)):
        squares += np.square(w, dtype=np.float64).sum(axis=0)
        offsets.append(w.astype(np.float64) @ stats.mean.astype(np.float64))
    if (squares * stats.spread).sum() > WORTH * (squares * (stats.spread + np.square(stats.mean))).sum():
        return None
    made = np.asarray(offsets, np.float32)
    return stats.mean / s, made if _stacked(n, weights) else made[0]


def outliers(n: Node, stats: Stats, weights: Weights, mean: np.ndarray | None) -> np.ndarray | None:
    """Of a scheme whose codes are floats with a scale a channel: the features, in order, that give most of the results
    when rows lose `mean`, i32[n]: as many as stand out, by units. None where they give hardly more than others would.

    A float's rounding error is a share of what is rounded, so that these features make most of the errors; a second
    digit of theirs, in rows and weights, costs two codes each.
    """
    k = len(stats.mean)
    unit = _unit(k) if _by_channel(n) else 0
    if not unit:
        return None
    squares = sum(np.square(w, dtype=np.float64).sum(axis=0) for w in weights.matrices(weight_of(n)))
    given = rounded(squares * (stats.spread + (np.square(stats.mean) if mean is None else 0)))
    most = np.argsort(-given, kind="stable")
    least, count = STANDS_OUT * unit / k * given.sum(), 0
    while count + unit <= k // MOST and given[most[count : count + unit]].sum() >= least:
        count += unit
    return np.sort(most[:count]).astype(np.int32) if count else None


def _unit(k: int) -> int:
    """How many of k features are kept to two digits at a time, each for two more codes: so many that codes stay as well
    aligned as without, some 3 % more of them where k is large, and no features where it would be more than MOST allows.
    """
    unit = 64 if k % 128 == 0 else 32
    return unit * -(-k // (64 * unit)) if MOST * unit <= k else 0


def _by_channel(n: Node) -> bool:
    row = scheme_of(n)
    return row is not None and row.is_float and row.group is None


def ranges(
    n: Node, stats: Stats, weights: Weights, s: np.ndarray, mean: np.ndarray | None, chosen: np.ndarray | None
) -> np.ndarray | None:
    """What the largest code of each channel stands for, f32[.., N], in a scheme whose codes are floats with a scale a
    channel, when rows lose `mean` before they are rounded and `chosen` features have two digits; None for another.
    """
    row = scheme_of(n)
    if row is None or not _by_channel(n):
        return None
    assert stats.sample is not None, "an input of a scheme that rounds activations has a sample"
    rows = stats.sample / s
    rows = rows if mean is None else rows - mean
    made = [float8.ranges(w * s, rows, row.limit, chosen) for w in weights.matrices(weight_of(n))]
    return np.stack(made) if _stacked(n, weights) else made[0]


def _stacked(n: Node, weights: Weights) -> bool:
    return len(weights.graph.types[weight_of(n)].shape) > 2
