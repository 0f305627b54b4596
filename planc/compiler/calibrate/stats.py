"""What calibration keeps of a product's inputs: in go rows of activations, out come sizes, products and some rows.

Sums are taken in float64 and rounded, so that another order of additions gives the same plan.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch

SAMPLE = 512  # rows kept of one input
BLOCK = 32  # the smallest group that a scheme knows: products of features are kept within blocks of the asked size


def rounded(x: np.ndarray) -> np.ndarray:
    """float32 with bfloat16's digits."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


@dataclass(frozen=True)
class Stats:
    """mean and peak of |x|, f32[K]; sample f32[<= SAMPLE, K]; gram f32[K/g, g, g], the mean of x x' within groups."""

    mean: np.ndarray
    peak: np.ndarray
    sample: np.ndarray
    gram: np.ndarray | None


class Collector:
    """Sums over the rows of one input, window by window."""

    def __init__(self, features: int, windows: int, group: int | None) -> None:
        self._total = np.zeros(features)
        self._peak = np.zeros(features, np.float32)
        self._rows: list[np.ndarray] = []
        self._count = 0
        self._each = -(-SAMPLE // windows)
        self._group = group
        self._gram = np.zeros((-(-features // group), group, group)) if group else None

    def add(self, x: np.ndarray) -> None:
        """Rows [.., K] of a window. The first is left out: it is read by all others, and like no other."""
        rows = np.ascontiguousarray(x.reshape(-1, x.shape[-1])[1:])
        size = np.abs(rows)
        self._total += size.sum(axis=0, dtype=np.float64)
        self._peak = np.maximum(self._peak, size.max(axis=0))
        self._count += len(rows)
        at = (np.arange(self._each) * len(rows) + len(rows) // 2) // self._each
        self._rows.append(rounded(rows[np.unique(np.minimum(at, len(rows) - 1))]))
        if self._gram is not None:
            self._gram += _grams(rows, self._gram.shape)

    def finite(self) -> bool:
        return bool(np.isfinite(self._total).all())

    def done(self) -> Stats:
        gram = None if self._gram is None else (self._gram / self._count).astype(np.float32)
        return Stats(rounded(self._total / self._count), rounded(self._peak), np.concatenate(self._rows)[:SAMPLE], gram)


def _grams(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    groups, group, _ = shape
    if rows.shape[1] < groups * group:
        rows = np.pad(rows, ((0, 0), (0, groups * group - rows.shape[1])))
    x = torch.from_numpy(rows).view(len(rows), groups, group).permute(1, 0, 2)
    return np.asarray(torch.bmm(x.transpose(1, 2), x).numpy())
