"""What calibration keeps of a product's inputs: in go rows of activations, out come sizes, products and some rows.

Sums are taken in float64 and rounded, so that another order of additions gives the same plan.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch

from planc.compiler.ir.quant import Scheme

SAMPLE = 512  # rows kept of one input
LONGEST = 4  # times the median length of a window's rows


def rounded(x: np.ndarray) -> np.ndarray:
    """float32 with bfloat16's digits."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


@dataclass(frozen=True)
class Stats:
    """Of inputs x: `size` and `peak`, the mean and the largest |x|, `mean` and `spread`, the mean square of x - mean,
    f32[K]. Besides, as the scheme needs: `gram` f32[K/g, g, g], how features vary together within a group, or `sample`
    f32[<= SAMPLE, K], some of the rows.

    The features of x[T, slots, K] mean something else in each slot: their mean is taken as 0.
    """

    size: np.ndarray
    peak: np.ndarray
    mean: np.ndarray
    spread: np.ndarray
    gram: np.ndarray | None
    sample: np.ndarray | None


class Collector:
    """Sums over the rows of one input, window by window."""

    def __init__(self, features: int, windows: int, row: Scheme) -> None:
        self._size, self._sum, self._squares = np.zeros(features), np.zeros(features), np.zeros(features)
        self._peak = np.zeros(features, np.float32)
        self._count, self._slots = 0, False
        self._each = -(-SAMPLE // windows)
        by_token = row.act is not None and not row.by_group
        self._rows: list[np.ndarray] | None = [] if by_token else None
        group = row.group or features
        self._gram = None if by_token else np.zeros((-(-features // group), group, group))

    def add(self, x: np.ndarray) -> None:
        """Rows [.., K] of a window."""
        self._slots |= x.ndim > 2
        rows = _bounded(x.reshape(-1, x.shape[-1]))
        sizes = np.abs(rows)
        self._size += sizes.sum(axis=0, dtype=np.float64)
        self._sum += rows.sum(axis=0, dtype=np.float64)
        self._squares += np.square(rows).sum(axis=0, dtype=np.float64)
        self._peak = np.maximum(self._peak, sizes.max(axis=0, initial=0))
        self._count += len(rows)
        if self._rows is not None:
            at = (np.arange(self._each) * len(rows) + len(rows) // 2) // self._each
            self._rows.append(rounded(rows[np.unique(np.minimum(at, len(rows) - 1))]))
        if self._gram is not None:
            self._gram += _grams(rows, self._gram.shape)

    def finite(self) -> bool:
        return bool(np.isfinite(self._size).all())

    def done(self) -> Stats:
        mean = self._sum / self._count * (not self._slots)
        sample = None if self._rows is None else np.concatenate(self._rows)[:SAMPLE]
        gram = None if self._gram is None else self._centred(self._gram / self._count, mean)
        spread = rounded(self._squares / self._count - np.square(mean))
        return Stats(rounded(self._size / self._count), rounded(self._peak), rounded(mean), spread, gram, sample)

    @staticmethod
    def _centred(gram: np.ndarray, mean: np.ndarray) -> np.ndarray:
        groups, group, _ = gram.shape
        middle = np.pad(mean, (0, groups * group - len(mean))).reshape(groups, group)
        return np.asarray(gram - middle[:, :, None] * middle[:, None, :], np.float32)


def _bounded(rows: np.ndarray) -> np.ndarray:
    """Rows with the length of none beyond LONGEST times the usual.

    A text's first token may be a thousand times as long as any other, in channels that others hardly use. All others
    look at it, so that it must count, but its square must not be all that counts.
    """
    length = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1))
    most = LONGEST * np.median(length)
    with np.errstate(invalid="ignore"):  # who asked will see that the sums are not finite
        return np.asarray(rows * np.minimum(1, most / np.maximum(length, 1e-30)).astype(np.float32)[:, None])


def _grams(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    groups, group, _ = shape
    if rows.shape[1] < groups * group:
        rows = np.pad(rows, ((0, 0), (0, groups * group - rows.shape[1])))
    x = torch.from_numpy(rows).view(len(rows), groups, group).permute(1, 0, 2)
    return np.asarray(torch.bmm(x.transpose(1, 2), x).numpy())
