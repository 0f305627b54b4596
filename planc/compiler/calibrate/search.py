"""Chooses the scales of a site and the ranges of a weight: in go a graph's products and their inputs, out come choices.

Scales are judged together for all products that read a site, each with the error that its own scheme makes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from planc.compiler.calibrate import awq, smooth
from planc.compiler.calibrate.run import Weights
from planc.compiler.calibrate.stats import Stats
from planc.compiler.ir.graph import Node
from planc.compiler.ir.quant import SCHEMES, Scheme
from planc.passes.sites import Reader, Site, weight_of

ROWS = 512  # rows of a weight that judge scales
STACK = 4  # matrices of a stack that do
BETTER = 0.98  # scales are kept that lower the error by more than what chance may


@dataclass(frozen=True)
class _Product:
    """A product as the search of scales sees it: some rows of w f32[n, K]."""

    w: Tensor
    units: np.ndarray
    stats: Stats
    scheme: Scheme

    def error(self, s: np.ndarray) -> float:
        factor = torch.from_numpy(s[self.units])
        if self.scheme.act:
            return smooth.error(self.w, torch.from_numpy(self.stats.sample), factor)
        return awq.error(self.w * factor, awq.scaled_gram(self.stats, s[self.units]), self.scheme)


def scheme_of(n: Node) -> Scheme | None:
    """The scheme that a product's weight will be stored in, when calibration can help it."""
    row = SCHEMES.get(str(n.attr("store", "")))
    return row if row and (row.zeros or row.act == "i8") else None


def key(n: Node) -> tuple[str, int | None]:
    """By what the statistics of a product's input go: its name, and the group of the product's scheme."""
    row = scheme_of(n)
    return n.inputs[0], row.group if row else None


def scales(site: Site, stats: Mapping[tuple[str, int | None], Stats], weights: Weights) -> np.ndarray | None:
    """The best scales of a site, f32[size]; None when none is clearly better than 1."""
    products = [p for r in site.readers for p in _products(r, stats, weights)]
    best = sum(p.error(np.ones(site.size, np.float32)) for p in products) * BETTER
    chosen = None
    for s in _candidates(site.size, products):
        total = float(f"{sum(p.error(s) for p in products):.6g}")  # what the order of additions changes must not count
        if total < best:
            best, chosen = total, s
    return chosen


def _products(reader: Reader, stats: Mapping[tuple[str, int | None], Stats], weights: Weights) -> Iterator[_Product]:
    row = scheme_of(reader.node)
    if row is None:
        return
    for w in weights.matrices(weight_of(reader.node), STACK):
        at = np.unique(np.linspace(0, len(w) - 1, min(ROWS, len(w))).astype(int))
        yield _Product(torch.from_numpy(w[at]), reader.units, stats[key(reader.node)], row)


def _candidates(size: int, products: list[_Product]) -> Iterator[np.ndarray]:
    if any(p.scheme.zeros for p in products):
        mean = np.maximum.reduce([_by_unit(p.stats.mean, p.units, size, np.add) / _count(p, size) for p in products])
        yield from awq.candidates(mean)
    if any(p.scheme.act for p in products):
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


def clips(n: Node, stats: Stats, weights: Weights, factor: np.ndarray | None) -> np.ndarray | None:
    """The largest |w * factor| to keep of each group of a channel, [.., K/g, N]; None for a scheme without groups."""
    row = scheme_of(n)
    if row is None or not row.zeros:
        return None
    s = np.ones(len(stats.mean), np.float32) if factor is None else factor
    gram = awq.scaled_gram(stats, s)
    made = [awq.clips(w * s, gram, row) for w in weights.matrices(weight_of(n))]
    return np.stack(made) if len(weights.graph.types[weight_of(n)].shape) > 2 else made[0]
