"""GGUF blocks whose codes a scheme holds as they are: in goes a tensor's span in the file, out come codes and scales.

Q4_0 is 32 codes around 8 with a half-precision scale. Q4_1's offset is no whole multiple of its scale, and Q8_0 has
groups of codes of 8 bits: no scheme holds those, and they are read as floats alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from planc.compiler.source.files import SpanReader
from planc.compiler.source.gguf_header import GGUFTensor
from planc.compiler.source.quantized.packed import Array, Packed

_GROUP = 32
_BYTES = 2 + _GROUP // 2  # of a block: its scale, then byte i holds the codes i and i + 16


def holds(tensor: GGUFTensor) -> bool:
    """Whether a scheme holds the tensor's codes: a matrix of Q4_0."""
    from gguf import GGMLQuantizationType

    return tensor.ggml_type == GGMLQuantizationType.Q4_0 and len(tensor.shape) == 2


def packed(file: SpanReader, tensor: GGUFTensor, order: Array | None) -> Packed:
    """A matrix that `holds` is true of, as its scheme has it; row i is row `order[i]` of the file."""

    def blocks(start: int, stop: int) -> Array:
        return _blocks(file, tensor, order, start, stop)

    return Packed(
        shape=tensor.shape,
        codes=lambda start, stop: _codes(blocks(start, stop)),
        scales=lambda start, stop: blocks(start, stop)[..., :2].copy().view("<f2")[..., 0].astype(np.float32),
        group=_GROUP,
        offset=8,
        scheme=f"int4-wo-g{_GROUP}",
    )


def row_order(process: Callable[[Array], Any], rows: int) -> Array | None:
    """Which row of a matrix each row of `process`'s result is, None if it keeps them; ValueError if it does more than
    move rows. Told from a narrow matrix of numbers.
    """
    numbers = np.arange(2 * rows, dtype=np.float64).reshape(rows, 2)
    made = np.asarray(process(numbers.copy()))
    if made.shape != numbers.shape:
        raise ValueError("the matrix takes another shape")
    order = (made[:, 0] // 2).astype(np.int64)
    if not np.array_equal(np.sort(order), np.arange(rows)) or not np.array_equal(made, numbers[order]):
        raise ValueError("the matrix is computed with")
    return None if np.array_equal(order, np.arange(rows)) else order


def _blocks(file: SpanReader, tensor: GGUFTensor, order: Array | None, start: int, stop: int) -> Array:
    """u8[stop - start, K/32, 18]."""
    n, k = tensor.shape
    row = k // _GROUP * _BYTES
    if order is None:
        found = file.read(tensor.offset + start * row, (stop - start) * row)
    else:
        found = file.read(tensor.offset, n * row).reshape(n, row)[order[start:stop]]
    return found.reshape(stop - start, k // _GROUP, _BYTES)


def _codes(blocks: Array) -> Array:
    octets = blocks[..., 2:]
    return np.concatenate([octets & 15, octets >> 4], axis=-1).reshape(len(blocks), -1)
