"""Packed layouts of linear weights: in goes W[N, K], out come blocks of 64 output channels, padded with zeros.

`n64` is [N/64][K][64], `n64k2` is [N/64][K/2][64][2], `n64k4` is [N/64][K/4][64][4]: the lane that a kernel reads holds
neighbours in K of one output channel, as the dot-product instructions of the targets want them.
"""

import numpy as np

from planc.compiler.ir.types import PACKED

BLOCK = 64


def pack(w: np.ndarray, layout: str) -> np.ndarray:
    """W[N, K] in `layout`, shape [N/64, K/g, 64, g] with g neighbours in K; N and K padded with zeros."""
    group = PACKED[layout]
    n, k = w.shape
    blocks, groups = -(-n // BLOCK), -(-k // group)
    out = np.zeros((blocks, groups, BLOCK, group), w.dtype)
    for b in range(blocks):  # one block at a time keeps the peak at one copy of the weight
        rows = w[b * BLOCK : (b + 1) * BLOCK]
        if k % group:
            rows = np.pad(rows, ((0, 0), (0, groups * group - k)))
        out[b, :, : len(rows)] = rows.reshape(len(rows), groups, group).transpose(1, 0, 2)
    return out


def unpack(packed: np.ndarray, n: int, k: int, layout: str) -> np.ndarray:
    """The inverse of `pack`: W[n, k] from its packed bytes, of any shape with the right element count."""
    group = PACKED[layout]
    blocks, groups = -(-n // BLOCK), -(-k // group)
    wide = packed.reshape(blocks, groups, BLOCK, group).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(wide.reshape(blocks * BLOCK, groups * group)[:n, :k])
