"""Operations on bits that numpy lacks: in go arrays, one element a lane or one for all, out come arrays."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

Array = Any  # NDArray[Any], whose arithmetic mypy types too loosely here


def high(a: Array, b: Array) -> Array:
    """The high 64 bits of a product of two 64-bit integers."""
    unsigned = a.dtype == np.uint64
    x, y = a.view(np.uint64), b.view(np.uint64)
    low_mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x0, x1, y0, y1 = x & low_mask, x >> half, y & low_mask, y >> half
    middle = x1 * y0 + ((x0 * y0) >> half)
    result = x1 * y1 + (middle >> half) + (((middle & low_mask) + x0 * y1) >> half)
    if unsigned:
        return result
    result = result - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return result.view(np.int64)


def extract(value: Array, start: Array, length: Array) -> Array:
    """bfe: `length` bits from `start` on, sign-extended when the type is signed."""
    width = 8 * value.itemsize
    kind = np.dtype(f"uint{width}")
    start, length = start & 0xFF, length & 0xFF
    bits = value.view(kind)
    shifted = np.where(start < width, bits >> np.minimum(start, width - 1).astype(kind), kind.type(0))
    if value.dtype == kind:
        return np.where(length < width, shifted & _ones(length, kind), shifted)
    shifted = np.where(start < width, value >> np.minimum(start, width - 1).astype(value.dtype), value >> (width - 1))
    up = np.clip(width - length.astype(np.int64), 0, width - 1).astype(value.dtype)
    return np.where(length == 0, value.dtype.type(0), (shifted << up) >> up).astype(value.dtype)


def insert(inner: Array, outer: Array, start: Array, length: Array) -> Array:
    """bfi: the low `length` bits of inner in the place of those of outer from `start` on."""
    kind, width = outer.dtype, 8 * outer.itemsize
    start, length = start & 0xFF, length & 0xFF
    at = np.minimum(start, width - 1).astype(kind)
    mask = np.where(start < width, _ones(length, kind) << at, kind.type(0))
    return (outer & ~mask) | ((inner << at) & mask)


def _ones(length: Array, kind: Any) -> Array:
    width = 8 * kind.itemsize
    partial = (kind.type(1) << np.minimum(length, width - 1).astype(kind)) - kind.type(1)
    return np.where(length < width, partial, ~kind.type(0))


def permute(a: Array, b: Array, chosen: int) -> Array:
    """prmt with a constant choice: byte j of the result is byte (nibble j) of b:a, or its sign repeated."""
    result = None
    for j, (byte, sign) in enumerate(_choice(chosen)):
        source = b if byte >= 4 else a
        shift = 8 * (byte & 3)
        if sign:
            part = (source.view(np.int32) << np.int32(24 - shift)) >> np.int32(31)
            part = part.view(np.uint32) & np.uint32(0xFF)
        else:
            part = (source >> np.uint32(shift)) & np.uint32(0xFF) if shift else source & np.uint32(0xFF)
        part = part << np.uint32(8 * j) if j else part
        result = part if result is None else result | part
    assert result is not None
    return result


@lru_cache(maxsize=256)
def _choice(chosen: int) -> list[tuple[int, bool]]:
    return [(chosen >> 4 * j & 7, bool(chosen >> 4 * j & 8)) for j in range(4)]


def permute_by(a: Array, b: Array, chosen: Array) -> Array:
    """prmt with a choice a lane."""
    a, b, chosen = np.broadcast_arrays(a, b, chosen)
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros(both.shape, np.uint32)
    for j in range(4):
        nibble = (chosen >> np.uint32(4 * j)) & np.uint32(15)
        byte = ((both >> ((nibble & np.uint32(7)) * np.uint32(8)).astype(np.uint64)) & np.uint64(0xFF)).astype(
            np.uint32
        )
        sign = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        result |= np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * j)
    return result


def leading_zeros(value: Array) -> Array:
    """clz as uint32."""
    width = 8 * value.itemsize
    kind = np.dtype(f"uint{width}")
    smeared = value.view(kind).copy()
    for step in (1, 2, 4, 8, 16, 32):
        if step < width:
            smeared |= smeared >> kind.type(step)
    return (width - np.bitwise_count(smeared).astype(np.int64)).astype(np.uint32)


def reverse_bits(value: Array) -> Array:
    """brev."""
    table = np.array([int(f"{byte:08b}"[::-1], 2) for byte in range(256)], np.uint8)
    swapped = np.ascontiguousarray(value).byteswap()
    return table[swapped.view(np.uint8)].view(value.dtype)


def pair(low: Array, high: Array) -> Array:
    """float32 [n, 2]."""
    low, high = np.broadcast_arrays(low, high)
    return np.stack([low, high], axis=1)


def to_int(value: Array, kind: Any) -> Array:
    """Integral float64 values as integers, clipped to the type's range; NaN is 0."""
    limits = np.iinfo(kind)
    value = np.where(np.isnan(value), 0.0, value)
    inside = np.clip(value, float(limits.min), float(limits.max))
    result = inside.astype(kind)
    return np.where(value >= float(limits.max), kind.type(limits.max), result)


def clipped(value: Array, kind: Any) -> Array:
    """Integers within the range of another type."""
    limits, own = np.iinfo(kind), np.iinfo(value.dtype)
    return np.clip(value, max(limits.min, own.min), min(limits.max, own.max))
