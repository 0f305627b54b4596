"""GGUF blocks whose codes a scheme holds as they are: in goes a tensor's span in the file, out come its parts.

    w = code * scale - minimum = (code - minimum / scale) * scale

A type is a row: how its blocks are laid out (ggml's structs), and the scheme that holds them. Codes of 5 and 6 bits
take 8. Where a scale is 0, so that the whole group is its minimum, that becomes the scale of codes one from zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from planc.compiler.ir.quant import SCHEMES
from planc.compiler.source.files import SpanReader
from planc.compiler.source.gguf_header import GGUFTensor
from planc.compiler.source.quantized.packed import Array, Packed

_Read = Callable[[Array], Array]  # of blocks u8[.., bytes]


@dataclass(frozen=True)
class _Layout:
    """Blocks of `size` weights in `bytes`: `codes` gives [.., size] as the scheme has them, `scales` and `minima` f32
    [.., groups].
    """

    scheme: str
    size: int
    bytes: int
    codes: _Read
    scales: _Read
    minima: _Read | None = None


def _half(blocks: Array, at: int) -> Array:
    """The f16 at a byte, f32[.., 1]."""
    return blocks[..., at : at + 2].copy().view("<f2").astype(np.float32)


def _nibbles(octets: Array, run: int = 16) -> Array:
    """Codes of 4 bits: of each `run` bytes the low halves, then the high ones."""
    runs = octets.reshape(*octets.shape[:-1], -1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=-1).reshape(*octets.shape[:-1], -1)


def _q5_0(blocks: Array) -> Array:
    """The fifth bits lie apart, a bit a weight."""
    high = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
    return (_nibbles(blocks[..., 6:]) | high << 4).astype(np.int8) - np.int8(16)


def _q6_k(blocks: Array) -> Array:
    """Of each 128 weights 64 bytes with four bits each, and 32 with the other two of four weights."""
    low = _nibbles(blocks[..., :128], run=64).reshape(*blocks.shape[:-1], 2, 4, 32)
    high = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return ((low | high << 4).astype(np.int8) - np.int8(32)).reshape(*blocks.shape[:-1], 256)


def _q4_k_six(blocks: Array) -> tuple[Array, Array]:
    """Scales and minima of eight groups in six bits, of which those of the last four lie in two parts."""
    low, mid, high = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    minima = np.concatenate([mid & 63, high >> 4 | mid >> 6 << 4], axis=-1)
    return scales.astype(np.float32), minima.astype(np.float32)


_LAYOUTS: Mapping[str, _Layout] = {
    "Q4_0": _Layout("int4-wo-g32", 32, 18, lambda b: _nibbles(b[..., 2:]), lambda b: _half(b, 0)),
    "Q4_1": _Layout(
        "q4_1", 32, 20, lambda b: _nibbles(b[..., 4:]), lambda b: _half(b, 0), lambda b: -_half(b, 2)
    ),
    "Q4_K": _Layout(
        "q4_1",
        256,
        144,
        lambda b: _nibbles(b[..., 16:], run=32),
        lambda b: _half(b, 0) * _q4_k_six(b)[0],
        lambda b: _half(b, 2) * _q4_k_six(b)[1],
    ),
    "Q5_0": _Layout("q8_0", 32, 22, _q5_0, lambda b: _half(b, 0)),
    "Q8_0": _Layout("q8_0", 32, 34, lambda b: b[..., 2:].view(np.int8), lambda b: _half(b, 0)),
    "Q6_K": _Layout("q6_k", 256, 210, _q6_k, lambda b: _half(b, 208) * b[..., 192:208].view(np.int8)),
}  # fmt: skip


def scheme_of(tensor: GGUFTensor) -> str | None:
    """The scheme that holds the tensor's codes; None if there is none, or the tensor is no matrix."""
    layout = _layout(tensor)
    return layout.scheme if layout and len(tensor.shape) == 2 else None


def packed(file: SpanReader, tensor: GGUFTensor, order: Array | None) -> Packed:
    """A matrix that has a `scheme_of`, as that has it; row i is row `order[i]` of the file."""
    layout = _layout(tensor)
    assert layout is not None
    row = SCHEMES[layout.scheme]
    group = row.group
    assert group is not None

    def blocks(start: int, stop: int) -> Array:
        return _blocks(file, tensor, layout, order, start, stop)

    def parts(start: int, stop: int) -> tuple[Array, Array | None]:
        return _scales(layout, blocks(start, stop))

    def codes(start: int, stop: int) -> Array:
        found = blocks(start, stop)
        made = layout.codes(found)
        if layout.minima:
            made = np.where(np.repeat(_flat(found, layout), group, axis=-1), 0, made)
        return made.astype(np.uint8 if row.codes == "u4" else np.int8).reshape(stop - start, -1)

    def zeros(start: int, stop: int) -> Array:
        found = parts(start, stop)[1]
        assert found is not None
        return found

    return Packed(
        shape=tensor.shape,
        codes=codes,
        scales=lambda start, stop: parts(start, stop)[0],
        group=group,
        zeros=zeros if layout.minima else None,
        offset=row.offset,
        scheme=layout.scheme,
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


def _layout(tensor: GGUFTensor) -> _Layout | None:
    from gguf import GGMLQuantizationType

    return _LAYOUTS.get(GGMLQuantizationType(tensor.ggml_type).name)


def _blocks(file: SpanReader, tensor: GGUFTensor, layout: _Layout, order: Array | None, start: int, stop: int) -> Array:
    """u8[stop - start, blocks of a row, bytes]."""
    n, k = tensor.shape
    row = k // layout.size * layout.bytes
    if order is None:
        found = file.read(tensor.offset + start * row, (stop - start) * row)
    else:
        found = file.read(tensor.offset, n * row).reshape(n, row)[order[start:stop]]
    return found.reshape(stop - start, -1, layout.bytes)


def _flat(blocks: Array, layout: _Layout) -> Array:
    """Groups without a scale, whose weights are all the minimum: bool[n, blocks, groups]."""
    return layout.scales(blocks) == 0


def _scales(layout: _Layout, blocks: Array) -> tuple[Array, Array | None]:
    """f32[n, groups of a row]: scales, and zero points where the type has minima."""
    n, scales = len(blocks), layout.scales(blocks)
    if layout.minima is None:
        return scales.reshape(n, -1), None
    minima, flat = layout.minima(blocks), _flat(blocks, layout)
    zeros = np.divide(minima, scales, out=np.ones_like(minima), where=~flat)
    return np.where(flat, -minima, scales).reshape(n, -1), np.where(flat, -1, zeros).astype(np.float32).reshape(n, -1)
