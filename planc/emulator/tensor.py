"""Tensor cores: in go fragments spread over the lanes of warps, and tiles in shared memory, out come products.

Fragments lie in registers as the PTX manual lays them out. Products of narrow types are exact; they are summed in
float64, so that a sum depends neither on an order, which a tensor core does not document, nor on its place in a tile.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from planc.emulator import floats
from planc.emulator.memory import Fault

if TYPE_CHECKING:
    from planc.emulator.machine import Machine

Array = Any  # NDArray[Any], whose arithmetic mypy types too loosely here
_LANE = np.arange(32)
_GROUP, _MEMBER = _LANE >> 2, _LANE & 3
_SWIZZLE_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}  # the descriptor's code -> bytes of a row
_KEPT = 48  # fragments that are kept: those of a tile's products
SWIZZLE_BITS = {16: 0, 32: 1, 64: 3, 128: 7}  # bytes of a row -> address bits that are mixed in


@lru_cache(maxsize=64)
def _left_order(k: int, per: int, registers: int) -> Array:
    """For each element of A [16, k] its place among [registers, lane, element]."""
    order = np.empty((16, k), np.int64)
    for r in range(registers):
        for e in range(per):
            place = (r * 32 + _LANE) * per + e
            order[_GROUP + 8 * (r & 1), _MEMBER * per + e + 4 * per * (r >> 1)] = place
    return order.reshape(-1)


@lru_cache(maxsize=64)
def _right_order(k: int, per: int, registers: int) -> Array:
    """For each element of B [k, 8] its place among [registers, lane, element]."""
    order = np.empty((k, 8), np.int64)
    for r in range(registers):
        for e in range(per):
            order[_MEMBER * per + e + 4 * per * r, _GROUP] = (r * 32 + _LANE) * per + e
    return order.reshape(-1)


@lru_cache(maxsize=64)
def _out_order(n: int) -> Array:
    """For each register and lane its place in D [16, n]."""
    registers = np.arange(n // 2)[:, None]
    row = _GROUP + 8 * ((registers >> 1) & 1)
    column = 8 * (registers >> 2) + 2 * _MEMBER + (registers & 1)
    order: Array = row * n + column
    return order


class Tensor:
    """Matrix instructions of one machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._kept: dict[tuple[Any, ...], tuple[tuple[Array, ...], Array]] = {}

    def _gather(self, registers: tuple[Array, ...], warps: int) -> Array:
        """[warps, registers, lanes] of uint32."""
        out = np.empty((warps, len(registers), 32), np.uint32)
        for number, register in enumerate(registers):
            out[:, number] = register.reshape(-1, 32) if register.size > 1 else register
        return out

    def _elements(self, registers: tuple[Array, ...], kind: str) -> Array:
        """Bit patterns [warps, registers * lanes * elements]."""
        size = floats.SIZE[kind]
        packed = self._gather(registers, self.machine.lanes // 32)
        return packed.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[size]).reshape(len(packed), -1)

    def _fragment(self, registers: tuple[Array, ...], kind: str, order: Array, shape: tuple[int, int]) -> Array:
        """float64 [warps, *shape]. One fragment goes into many products, so the last ones are kept."""
        key = (*map(id, registers), kind, shape)
        found = self._kept.get(key)
        if found is None:
            bits = np.take(self._elements(registers, kind), order, axis=1)
            values = floats.widen(bits, kind).astype(np.float64).reshape(-1, *shape)
            if len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)))
            found = self._kept[key] = registers, values  # the registers stay alive, so that no other gets their id
        return found[1]

    def _left(self, registers: tuple[Array, ...], kind: str, k: int) -> Array:
        return self._fragment(registers, kind, _left_order(k, 4 // floats.SIZE[kind], len(registers)), (16, k))

    def mma(
        self, a: tuple[Array, ...], b: tuple[Array, ...], c: tuple[Array, ...], k: int, left: str, right: str, kind: Any
    ) -> list[Array]:
        """mma.sync of m16n8: the registers of A·B + C."""
        second = self._fragment(b, right, _right_order(k, 4 // floats.SIZE[right], len(b)), (k, 8))
        product = np.matmul(self._left(a, left, k), second).astype(kind).reshape(-1, 128)
        return [np.take(product, o, axis=1).reshape(-1) + old for o, old in zip(_out_order(8), c, strict=True)]

    def wgmma(
        self,
        a: tuple[Array, ...] | Array,
        b: Array,
        old: tuple[Array, ...],
        keep: Array,
        shape: tuple[int, int, int],
        left: str,
        right: str,
        kind: Any,
        sign: int,
        k_slow: tuple[bool, bool],
    ) -> list[Array]:
        """wgmma of four warps: D = A·B (+ D where `keep`); operands in shared memory come by descriptor."""
        _, n, k = shape
        if isinstance(a, tuple):
            first = self._left(a, left, k).reshape(-1, 64, k)
        else:
            first = floats.widen(self._tile(a, 64, k, left, k_slow[0]), left).astype(np.float64)
        second = floats.widen(self._tile(b, n, k, right, k_slow[1]), right).astype(np.float64)
        product = np.matmul(first if sign == 1 else sign * first, second.swapaxes(1, 2))
        rows = product.astype(kind).reshape(-1, 16 * n)
        every = keep.size == 1 and bool(keep[0])
        out = []
        for order, before in zip(_out_order(n), old, strict=True):
            value = np.take(rows, order, axis=1).reshape(-1)
            out.append(value + before if every else np.where(keep, value + before, value))
        return out

    def _tile(self, descriptor: Array, rows: int, k: int, kind: str, k_slow: bool) -> Array:
        """Bit patterns [groups, rows, k] of an operand in shared memory."""
        m, each = self.machine, descriptor if descriptor.size == 1 else descriptor[::128]
        check_tiles(m, each, rows, k, floats.SIZE[kind], k_slow)
        return self.tile(np.broadcast_to(each, m.lanes // 128), m.shared_base[::128], rows, k, kind, k_slow)

    def tile(self, descriptors: Array, bases: Array, rows: int, k: int, kind: str, k_slow: bool) -> Array:
        """As _tile, of a descriptor each and where the shared memory of its block begins; they are checked."""
        size = floats.SIZE[kind]
        part: Any = {1: np.uint8, 2: np.uint16, 4: np.uint32}[size]
        values = np.unique(descriptors)
        places = np.stack([_places(int(v), rows, k, size, k_slow) for v in values])
        index = (places[np.searchsorted(values, descriptors)] + bases.reshape(-1, 1, 1)) >> 4
        bits = self.machine.shared[16][index].view(part)  # [groups, slow axis, fast axis]
        return bits.swapaxes(1, 2) if k_slow else bits

    def load_matrix(self, base: Array, offset: int, mask: Array | None, count: int, transposed: bool) -> list[Array]:
        """ldmatrix: rows of 16 bytes whose addresses lanes 8j..8j+7 hold for matrix j."""
        m = self.machine
        lanes = np.arange(m.lanes) & 31
        taking = lanes < 8 * count if mask is None else (lanes < 8 * count) & mask
        at = None if taking.all() else np.flatnonzero(taking)
        index = m.shared_index(base, offset, at, 16)
        rows = np.zeros(m.lanes, np.complex128)
        if at is None:
            rows = m.shared[16][index]
        else:
            rows[at] = m.shared[16][index]
        words = rows.view(np.uint32).reshape(-1, 4, 8, 4)  # warp, matrix, row, word
        if transposed:
            halves = np.ascontiguousarray(words).view(np.uint16).reshape(-1, 4, 8, 8)
            words = np.ascontiguousarray(halves.swapaxes(2, 3)).view(np.uint32)
        return [np.ascontiguousarray(words[:, j]).reshape(-1) for j in range(count)]

    def store_matrix(
        self, base: Array, offset: int, mask: Array | None, values: tuple[Array, ...], count: int, transposed: bool
    ) -> None:
        """stmatrix, the inverse of load_matrix."""
        m = self.machine
        words = np.zeros((m.lanes // 32, 4, 8, 4), np.uint32)
        for j, value in enumerate(values):
            words[:, j] = m.full(value).reshape(-1, 8, 4)
        if transposed:
            halves = words.view(np.uint16).reshape(-1, 4, 8, 8)
            words = np.ascontiguousarray(halves.swapaxes(2, 3)).view(np.uint32)
        rows = words.reshape(-1, 4).view(np.complex128).reshape(-1)
        lanes = np.arange(m.lanes) & 31
        taking = lanes < 8 * count if mask is None else (lanes < 8 * count) & mask
        at = np.flatnonzero(taking)
        m.shared[16][m.shared_index(base, offset, at, 16)] = rows[at]

    def transpose(self, value: Array) -> Array:
        """movmatrix: the 8x8 matrix of a warp, transposed."""
        halves = self.machine.full(value).view(np.uint16).reshape(-1, 8, 8)
        return np.ascontiguousarray(halves.swapaxes(1, 2)).view(np.uint32).reshape(-1)


def check_tiles(machine: Machine, descriptors: Array, rows: int, k: int, size: int, k_slow: bool) -> None:
    """Faults when an operand does not lie within shared memory."""
    for value in np.unique(descriptors):
        end = int(_places(int(value), rows, k, size, k_slow).max()) + 16
        if end > machine.shared_bytes:
            raise Fault(f"a matrix ends at byte {end} of {machine.shared_bytes} in shared memory", 0)


@lru_cache(maxsize=4096)
def _places(descriptor: int, rows: int, k: int, size: int, k_slow: bool) -> Array:
    """Shared addresses of the 16-byte pieces of an operand: [rows, k pieces], or [k, row pieces] when k is slow."""
    base, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    span = _SWIZZLE_BYTES[descriptor >> 62 & 3]
    if not k_slow:
        row, piece = np.arange(rows)[:, None], np.arange(k * size // 16)[None]
        column = piece * 16 if span > 16 else piece * leading
        place = base + (row // 8) * stride + (row % 8) * span + column
    else:
        per = span // size
        if span == 16:
            leading, stride = stride, leading  # rows and K change places where nothing is swizzled
        slow, row = np.arange(k)[:, None], np.arange(0, rows, 16 // size)[None]
        place = base + (row // per) * leading + (slow // 8) * stride + (slow % 8) * span + (row % per) * size
    mixed: Array = place ^ (((place >> 7) & SWIZZLE_BITS[span]) << 4)
    return mixed
