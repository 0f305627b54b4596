"""Codes that lie packed in 32-bit words become one byte each."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
TILE = 32  # columns of words transposed at a time: they stay in the cache


def fields(words: Array, bits: int) -> Array:
    """u8[.., 32 / bits] of i32[..]: a word's fields of 4 or 8 bits, the lowest first."""
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    if bits == 8:
        return octets
    return nibbles(octets)


def nibbles(octets: Array) -> Array:
    """u8[.., 2 * n] of u8[.., n]: each byte's low half, then its high half."""
    out = np.empty((*octets.shape, 2), np.uint8)
    np.bitwise_and(octets, 15, out=out[..., 0])
    np.right_shift(octets, 4, out=out[..., 1])
    return out.reshape(*octets.shape[:-1], -1)


def rows(words: Array, bits: int) -> Array:
    """[n, m] words whose fields follow one another along the last axis: u8[n, m * 32 / bits]."""
    return fields(words, bits).reshape(words.shape[0], -1)


def columns(words: Array, bits: int) -> Array:
    """[m, n] words whose fields follow one another along the first axis: u8[n, m * 32 / bits]."""
    m, n = words.shape
    out = np.empty((n, m, 32 // bits), np.uint8)
    for at in range(0, n, TILE):
        out[at : at + TILE] = fields(words[:, at : at + TILE], bits).transpose(1, 0, 2)
    return out.reshape(n, -1)


def signed(codes: Array) -> Array:
    """i8 codes of u8 codes whose zero is 128."""
    return (codes ^ np.uint8(128)).view(np.int8)
