"""Packed layouts of linear weights: in goes W[.., N, K], out come its bytes as kernels read them, padded with zeros.

`n64` is [N/64][K][64], `n64k2` is [N/64][K/2][64][2], `n64k4` is [N/64][K/4][64][4]: the lane that a kernel reads holds
neighbours in K of one output channel, as the dot-product instructions of the targets want them. `n64u4` is `n64k4` of
i8, each 128 more than it is: bytes without a sign, as vpdpbusd takes them. `n64k8` is for codes of 4 bits:
[N/64][K/8][64][4] bytes, each with the code of an even k in its low half and that of the next in its high half. `k2` is
[N][K/2] bytes of such pairs, rows as they were: the layout of codes of 4 bits on GPUs.
A stack of matrices (experts) is packed one by one.
"""

from collections.abc import Sequence

import numpy as np

from planc.compiler.ir.types import PACKED, PAIRS

BLOCK = 64
HALVES, UNSIGNED = "n64k8", "n64u4"


def packed_shape(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """[.., N/64, K/g, 64, g] of W[.., N, K] in `layout`, with g neighbours in K; g/2 where two share a byte.

    [.., N, K/2] for `k2`.
    """
    *stack, n, k = shape
    if layout == PAIRS:
        return (*stack, n, -(-k // 2))
    group = PACKED[layout]
    return (*stack, -(-n // BLOCK), -(-k // group), BLOCK, group // 2 if layout == HALVES else group)


def pack(w: np.ndarray, layout: str) -> np.ndarray:
    """W[.., N, K] in `layout`, of shape `packed_shape`; N and K padded with zeros."""
    if layout == PAIRS:
        low, high = w[..., ::2], w[..., 1::2]
        return low | (high if w.shape[-1] % 2 == 0 else np.pad(high, [(0, 0)] * (w.ndim - 1) + [(0, 1)])) << 4
    out = np.zeros(packed_shape(w.shape, layout), w.dtype)
    for at in np.ndindex(*w.shape[:-2]):
        _pack(w[at], out[at], PACKED[layout])
    return _with_other_sign(out) if layout == UNSIGNED else out


def _with_other_sign(codes: np.ndarray) -> np.ndarray:
    """i8 as bytes of 128 more, and back, in place."""
    octets = codes.view(np.uint8)
    np.bitwise_xor(octets, 0x80, out=octets)
    return codes


def _pack(w: np.ndarray, out: np.ndarray, group: int) -> None:
    blocks, groups = out.shape[:2]
    k = w.shape[1]
    for b in range(blocks):  # one block at a time keeps the peak at one copy of the weight
        rows = w[b * BLOCK : (b + 1) * BLOCK]
        if k % group:
            rows = np.pad(rows, ((0, 0), (0, groups * group - k)))
        lanes = rows.reshape(len(rows), groups, group).transpose(1, 0, 2)
        out[b, :, : len(rows)] = lanes if out.shape[3] == group else lanes[..., ::2] | lanes[..., 1::2] << 4


def unpack(packed: np.ndarray, shape: Sequence[int], layout: str) -> np.ndarray:
    """The inverse of `pack`: W of `shape` from its packed bytes, of any shape with the right element count."""
    *stack, n, k = shape
    if layout == PAIRS:
        pairs = packed.reshape(packed_shape(shape, layout))
        return np.ascontiguousarray(np.stack([pairs & 15, pairs >> 4], -1).reshape(*stack, n, -1)[..., :k])
    *_, blocks, groups, _, size = packed_shape(shape, layout)
    group = PACKED[layout]
    lanes = packed.reshape(*stack, blocks, groups, BLOCK, size)
    if layout == UNSIGNED:
        lanes = _with_other_sign(lanes.copy())
    if layout == HALVES:
        lanes = np.stack([lanes & 15, lanes >> 4], axis=-1).reshape(*lanes.shape[:-1], group)
    wide = lanes.swapaxes(-3, -2)
    return np.ascontiguousarray(wide.reshape(*stack, blocks * BLOCK, groups * group)[..., :n, :k])
