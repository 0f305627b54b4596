"""x @ round(w).T ~ x @ w.T with codes that are floats: in go weights and rows, out come the ranges that lose the least.

A float's rounding error is a share of what is rounded, whatever the scale; but which codes lie next to a channel's
weights changes with it, and of several draws one is the best for the rows that the model multiplies.
"""

import numpy as np
import torch
from torch import Tensor

from planc.compiler.calibrate.stats import rounded

STEPS = 16  # ranges to try, from the largest |w| up to twice that: from there on all repeats
ROWS = 256  # rows that judge
_ELEMENTS = 1 << 22  # of a weight in one go


def ranges(w: np.ndarray, rows: np.ndarray, limit: float, outliers: np.ndarray | None = None) -> np.ndarray:
    """What the largest code of each channel of w f32[N, K] stands for, f32[N], for inputs like rows f32[n, K], when
    `outliers` i32[..] of the features are kept to two digits.
    """
    sample = torch.from_numpy(rows[:: -(-len(rows) // ROWS)])
    twice = torch.from_numpy(np.zeros(0, np.int64) if outliers is None else outliers.astype(np.int64))
    pace = max(1, _ELEMENTS // w.shape[1])
    parts = (torch.from_numpy(w[i : i + pace]) for i in range(0, len(w), pace))
    return np.concatenate([_ranges(part, sample, limit, twice) for part in parts])


def _ranges(w: Tensor, sample: Tensor, limit: float, twice: Tensor) -> np.ndarray:
    most = w.abs().amax(1)
    chosen, best = most, _errors(w, most, sample, limit, twice)
    for step in range(1, STEPS):
        bound = torch.from_numpy(rounded((most * 2 ** (step / STEPS)).numpy()))
        made = _errors(w, bound, sample, limit, twice)
        better = made < best * (1 - 1e-4)  # what the order of additions changes must not count
        best, chosen = torch.where(better, made, best), torch.where(better, bound, chosen)
    return np.asarray(chosen.numpy())


def _errors(w: Tensor, bound: Tensor, sample: Tensor, limit: float, twice: Tensor) -> Tensor:
    """[N]: the sum of squares of what rounding adds to sample @ w.T."""
    scale = (bound / limit)[:, None]
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    lost = _coded(w, scale, limit).sub_(w)
    lost[:, twice] -= _coded(lost[:, twice], scale, limit)
    return (sample @ lost.T).square_().sum(0)


def _coded(w: Tensor, scale: Tensor, limit: float) -> Tensor:
    return (w / scale).clamp_(-limit, limit).to(torch.float8_e4m3fn).float().mul_(scale)
