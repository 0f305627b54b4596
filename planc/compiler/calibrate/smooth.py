"""round(x / s) @ round(w * s).T ~ x @ w.T in 8 bits: in go rows and weights, out come scales and errors.

A channel whose activations are large costs all others of its token their digits; s moves some of it to the weight. Both
turn before they are rounded (hadamard.py), which shares out what is left.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from planc.compiler.calibrate.stats import rounded
from planc.compiler.ir.hadamard import block, rotate
from planc.compiler.ir.quant import LIMITS

POWERS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # of the activations' peak, the rest is the weight's
_LIMIT = LIMITS["i8"]


def candidates(peak: np.ndarray, weight: np.ndarray) -> Iterator[np.ndarray]:
    """Scales to try, for the largest |x| and |w| of each unit."""
    for power in POWERS:
        s = np.maximum(peak, 1e-5) ** power / np.maximum(weight, 1e-5) ** (1 - power)
        yield rounded(np.asarray(s / np.sqrt(s.max() * s.min())))


def error(w: Tensor, sample: Tensor, s: Tensor) -> float:
    """The sum of squares of what rounding changes in sample[n, K] @ w[N, K].T when s[K] is moved."""
    size = block(w.shape[1])
    given = _rounded(sample / s, size) @ _rounded(w * s, size).T
    return float((given - sample @ w.T).square().sum(dtype=torch.float64))


def _rounded(x: Tensor, size: int) -> Tensor:
    """Each row in 8 bits, as the scheme rounds channels of weights and tokens of activations."""
    x = torch.from_numpy(rotate(x.numpy(), size))
    scale = x.abs().amax(-1, keepdim=True) / _LIMIT
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (x / scale).round_().clamp_(-_LIMIT, _LIMIT).mul_(scale)
