"""x @ H along the last axis, H orthogonal: rows whose largest magnitude is near the others', so that codes are finer.

A few features of a model's activations are many times as large as all others, which a scale a token leaves few codes to
share. H spreads each feature over `block` of them. Rows and weights turn alike, so that their product stays the same.
"""

import numpy as np

MOST = 128  # features that one spreads over
# Each feature of a block has a sign first, else what all have in common would gather in one: the digits of pi.
_SIGNS = 0x243F6A8885A308D313198A2E03707344
WORDS = tuple((_SIGNS >> 32 * i) & 0xFFFFFFFF for i in range(MOST // 32))  # bit b: feature b of a block is negated


def block(features: int) -> int:
    """How many of `features` one spreads over: the largest power of two that divides them, MOST at most."""
    return min(features & -features, MOST)


def signs(size: int) -> np.ndarray:
    """f32[size] of 1 and -1."""
    return np.array([1 - 2 * (_SIGNS >> b & 1) for b in range(size)], np.float32)


def scale(size: int) -> np.float32:
    """What makes the sums of a block of `size` an orthogonal transform."""
    return np.float32(size**-0.5)


def rotate(x: np.ndarray, size: int) -> np.ndarray:
    """f32[.., K] of x[.., K]: features K / size apart form a block, summed by a fast Walsh-Hadamard transform.

    Additions in float32, in this order: partners half a block apart first, neighbours last.
    """
    if size == 1:
        return np.asarray(x, np.float32)
    return _sums(_blocks(x, size) * signs(size)[:, None]).reshape(x.shape)


def back(y: np.ndarray, size: int) -> np.ndarray:
    """f32[.., K]: x of y = rotate(x, size), but for rounding."""
    if size == 1:
        return np.asarray(y, np.float32)
    return np.asarray(_sums(_blocks(y, size).copy()) * signs(size)[:, None]).reshape(y.shape)


def _blocks(x: np.ndarray, size: int) -> np.ndarray:
    return np.asarray(x, np.float32).reshape(*x.shape[:-1], size, -1)


def _sums(blocks: np.ndarray) -> np.ndarray:
    """The transform of each block of [.., size, count], in place."""
    size = blocks.shape[-2]
    half = size // 2
    while half:
        pairs = blocks.reshape(*blocks.shape[:-2], -1, 2, half, blocks.shape[-1])
        a, b = pairs[..., 0, :, :], pairs[..., 1, :, :]
        pairs[..., 0, :, :], pairs[..., 1, :, :] = a + b, a - b
        half //= 2
    blocks *= scale(size)
    return blocks
