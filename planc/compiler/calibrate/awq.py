"""deq(quant(w * s)) / s ~ w where activations are large: in go weights and their inputs, out come scales and ranges.

The scales are a power of the activations' mean size; the ranges shrink for a group of a channel where that lowers the
error of its product. Errors are those of products with the calibration's activations, so that what the model seldom
multiplies by much may be rounded more. What the mean of the activations makes of them is the same for every token: an
offset takes it back, and only how activations vary about their mean is searched for.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from planc.compiler.calibrate.stats import Stats, rounded
from planc.compiler.ir.quant import Scheme

STEPS = 20  # powers between 0 and 1
SHRINKS = tuple(1 - i / 20 for i in range(11))  # 1.0 .. 0.5
_ELEMENTS = 1 << 22  # of a weight in one go
_STORED = {"f32": torch.float32, "bf16": torch.bfloat16}  # scales


def candidates(mean: np.ndarray) -> Iterator[np.ndarray]:
    """Scales to try, for the mean |x| of each unit."""
    for step in range(1, STEPS):
        s = np.maximum(mean, 1e-4) ** (step / STEPS)
        yield rounded(np.asarray(s / np.sqrt(s.max() * s.min())))


def error(w: Tensor, gram: Tensor, scheme: Scheme) -> float:
    """What rounding adds to x @ w[N, K].T in the mean of squares, summed over channels, for inputs of this gram."""
    wide = grouped(w, scheme)
    return float(_errors(wide, affine(wide, *_ranges(wide), scheme), gram).sum(dtype=torch.float64))


def clips(w: np.ndarray, gram: Tensor, mean: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """The largest |w| to keep of each group of each channel, infinity where all stay: f32[K/g, N] of w f32[N, K]; and
    what rounding to these then takes from each channel where activations are at their mean [K]: f32[N].
    """
    pace = max(1, _ELEMENTS // w.shape[1])
    middle = grouped(torch.from_numpy(mean[None]), scheme).double()
    parts = [_clips(torch.from_numpy(w[i : i + pace]), gram, middle, scheme) for i in range(0, len(w), pace)]
    return np.concatenate([p[0] for p in parts], axis=1), np.concatenate([p[1] for p in parts])


def _clips(w: Tensor, gram: Tensor, middle: Tensor, scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    wide = grouped(w, scheme)
    low, high = _ranges(wide)
    most = torch.maximum(-low, high)
    best, kept = _errors(wide, affine(wide, low, high, scheme), gram), torch.full_like(most, torch.inf)
    for shrink in SHRINKS[1:]:
        bound = most * shrink
        given = affine(wide, torch.maximum(low, -bound), torch.minimum(high, bound), scheme)
        made = _errors(wide, given, gram)
        better = made < best * (1 - 1e-4)  # what the order of additions changes must not count
        best, kept = torch.where(better, made, best), torch.where(better, bound, kept)
    clip = torch.from_numpy(rounded(kept.numpy()))
    given = affine(wide, torch.maximum(low, -clip), torch.minimum(high, clip), scheme)
    lost = torch.bmm((wide - given).double(), middle.transpose(1, 2)).sum(0)[:, 0]
    return clip.numpy(), rounded(lost.numpy())


def scaled_gram(stats: Stats, s: np.ndarray) -> Tensor:
    """The gram of x / s."""
    assert stats.gram is not None, "an input of a scheme with groups has a gram"
    groups, group, _ = stats.gram.shape
    inverse = np.ones(groups * group, np.float32)
    inverse[: len(s)] = 1 / s
    inverse = inverse.reshape(groups, group)
    return torch.from_numpy(stats.gram * inverse[:, :, None] * inverse[:, None, :])


def grouped(w: Tensor, scheme: Scheme) -> Tensor:
    """w[N, K] as [K/g, N, g], padded with zeros."""
    group = int(scheme.group or w.shape[1])
    if w.shape[1] % group:
        w = torch.nn.functional.pad(w, (0, group - w.shape[1] % group))
    return w.reshape(len(w), -1, group).transpose(0, 1).contiguous()


def _ranges(w: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest [K/g, N] of groups, zero included."""
    return w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)


def affine(w: Tensor, low: Tensor, high: Tensor, scheme: Scheme) -> Tensor:
    """w [K/g, N, g] as the scheme gives it back: what `Scheme.part` and `dequantize` do for codes with zero points."""
    s = ((high - low) / scheme.limit).to(_STORED[scheme.scales]).float()
    s = torch.where(s == 0, torch.ones_like(s), s)
    zero = torch.round(-low / s)[..., None]
    s = s[..., None]
    return (w / s).round_().add_(zero).clamp_(0, scheme.limit).sub_(zero).mul_(s)


def _errors(w: Tensor, given: Tensor, gram: Tensor) -> Tensor:
    """[K/g, N]: the mean square of x @ (given - w) over the calibration's x, group by group."""
    off = given - w
    return (torch.bmm(off, gram) * off).sum(-1)
