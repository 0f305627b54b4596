"""Asynchronous copies: in go cp.async groups, barriers in shared memory and tensor tiles (TMA), out come moved bytes.

cp.async writes its bytes when they are waited for, so that a missing wait shows; tiles move at once. A tensor map is
128 bytes of our own layout, which the stand-in driver and `tensormap.replace` both write.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from planc.emulator.emit import address_of_params
from planc.emulator.memory import CARRIERS, Fault
from planc.emulator.tensor import SWIZZLE_BITS

if TYPE_CHECKING:
    from planc.emulator.machine import Machine

Array = NDArray[Any]
MAP_BYTES = 128
_MAGIC = 0x504D4154
_SWIZZLED_ROW = {0: 16, 1: 32, 2: 64, 3: 128}
# PTX's element type of tensormap.replace -> bytes
_ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 4, 9: 8, 10: 2, 11: 4, 12: 4}
_FIELDS = {"global_dim": (16, 4), "global_stride": (40, 8), "box_dim": (80, 2)}


class Copies:
    """cp.async of one machine: groups of writes to shared memory that are still to come."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._open: list[tuple[int, Array, Array]] = []
        self._groups: list[list[tuple[int, Array, Array]]] = []

    def add(
        self, to: Array, to_offset: int, source: Array, offset: int, mask: Array | None, size: int, filled: Array | None
    ) -> None:
        """Copies `size` bytes a lane; where `filled` is 0 zeros come instead and nothing is read."""
        m = self.machine
        at = m.active(mask)
        if at is not None and not at.size:
            return
        index = m.shared_index(m.full(to), to_offset, at, size)
        values = np.zeros(len(index), CARRIERS[size])
        if filled is None:
            reading = None
        else:
            sizes = m.pick(filled, at)
            if ((sizes != 0) & (sizes != size)).any():
                raise Fault(f"cp.async fills only a part of {size} bytes, which is not emulated", 0)
            reading = np.flatnonzero(np.broadcast_to(sizes, len(index)) != 0)
        if reading is None or reading.size:
            address = m.pick(m.full(source + np.uint64(offset)), at)
            if reading is None:
                values[:] = m.fetch(address, size, "cp.async", at)
            else:
                lanes = reading if at is None else at[reading]
                values[reading] = m.fetch(address[reading], size, "cp.async", lanes)
        self._open.append((size, index, values))

    def commit(self) -> None:
        """Closes a group."""
        self._groups.append(self._open)
        self._open = []

    def wait(self, left: int) -> None:
        """Ends all groups but the last `left`."""
        done, self._groups = self._groups[: len(self._groups) - left], self._groups[len(self._groups) - left :]
        if left == 0:
            self._groups = []
        for group in done:
            for size, index, values in group:
                self.machine.shared[size][index] = values

    def flush(self) -> None:
        """Ends every copy."""
        self.commit()
        self.wait(0)


class Barriers:
    """mbarrier objects: arrivals that are missing, their number a phase, bytes still to come, and the phase.

    Our layout of the 64 bits: missing 20, number 20, bytes 22 (signed), one unused, phase 1.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def init(self, base: Array, offset: int, mask: Array | None, count: Array) -> None:
        at = self.machine.active(mask)
        counts = self.machine.pick(count, at).astype(np.uint64)
        self.machine.shared[8][self._index(base, offset, at)] = counts | (counts << np.uint64(20))

    def inval(self, base: Array, offset: int, mask: Array | None, _: None) -> None:
        self._index(base, offset, self.machine.active(mask))

    def arrive(self, base: Array, offset: int, mask: Array | None, count: Array | None, sent: Array | None) -> None:
        """`count` arrivals (none when None) and `sent` more bytes that must come."""
        at = self.machine.active(mask)
        index = self._index(base, offset, at)
        for where in np.unique(index):
            same = index == where
            arrivals = int(self._of(count, at, index)[same].sum()) if count is not None else 0
            self._change(int(where), arrivals, int(self._of(sent, at, index)[same].sum()) if sent is not None else 0)

    def _of(self, values: Array, at: Array | None, index: Array) -> Array:
        return np.broadcast_to(self.machine.pick(values, at), index.shape).astype(np.int64)

    def came(self, index: Array, nbytes: int) -> None:
        """A tile of `nbytes` has come for each barrier."""
        for where in index:
            self._change(int(where), 0, -nbytes)

    def arrived(self, index: Array) -> None:
        """An arrival at each barrier."""
        for where in index:
            self._change(int(where), 1, 0)

    def _change(self, where: int, arrivals: int, expected: int) -> None:
        state = int(self.machine.shared[8][where])
        missing, number, phase = state & 0xFFFFF, state >> 20 & 0xFFFFF, state >> 63
        to_come = (state >> 40 & 0x3FFFFF) - (1 << 22) * (state >> 61 & 1) + expected
        missing -= arrivals
        if missing < 0:
            raise Fault(f"{-missing} threads more than {number} arrive at a barrier", 0)
        if missing == 0 and to_come == 0:
            missing, phase = number, phase ^ 1
        packed = missing | number << 20 | (to_come & 0x3FFFFF) << 40 | phase << 63
        self.machine.shared[8][where] = np.uint64(packed)

    def passed(self, base: Array, offset: int, mask: Array | None, parity: Array) -> Array:
        """True; only products end while lanes wait, so a phase that does not end with them is an error."""
        at = self.machine.active(mask)
        if at is not None and not at.size:
            return np.array([True])
        index = self._index(base, offset, at)
        self.machine.tensor_memory.settle(index, self.machine.pick(parity, at))
        phase = self.machine.shared[8][index] >> np.uint64(63)
        waiting = phase == (self.machine.pick(parity, at) & 1)
        if waiting.any():
            lane = int(np.flatnonzero(np.broadcast_to(waiting, phase.shape))[0])
            raise Fault(
                "waits for a barrier that no one completes; kernels whose warps do different work are not emulated",
                lane if at is None else int(at[lane]),
            )
        return np.array([True])

    def _index(self, base: Array, offset: int, at: Array | None) -> Array:
        return self.machine.shared_index(self.machine.full(base), offset, at, 8)


@dataclass(frozen=True)
class TensorMap:
    """A tensor and the tile of it that moves, the fast axis first; strides are in bytes."""

    address: int
    element: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    def encode(self) -> bytes:
        """Our 128 bytes."""
        out = bytearray(MAP_BYTES)
        struct.pack_into("<IBBBxQ", out, 0, _MAGIC, self.element, len(self.dims) - 1, self.swizzle, self.address)
        struct.pack_into(f"<{len(self.dims)}I", out, 16, *self.dims)
        struct.pack_into(f"<{len(self.dims) - 1}Q", out, 40, *self.strides[1:])
        struct.pack_into(f"<{len(self.dims)}H", out, 80, *self.box)
        return bytes(out)


def decode(data: bytes) -> TensorMap:
    """The tensor map of 128 bytes. Fault when they are none."""
    magic, element, last, swizzle, address = struct.unpack_from("<IBBBxQ", data)
    if magic != _MAGIC:
        raise Fault("a tile is moved by 128 bytes that are no tensor map", 0)
    rank = last + 1
    dims, box = struct.unpack_from(f"<{rank}I", data, 16), struct.unpack_from(f"<{rank}H", data, 80)
    return TensorMap(address, element, dims, (element, *struct.unpack_from(f"<{last}Q", data, 40)), box, swizzle)


@lru_cache(maxsize=256)
def _tile(box: tuple[int, ...], element: int, swizzle: int, start: int) -> tuple[list[Array], Array]:
    """Coordinates of a tile's elements within it, the fast axis first, and their shared addresses."""
    grid = np.indices(box[::-1]).reshape(len(box), -1)[::-1]
    linear = start + np.arange(grid.shape[1]) * element
    mixed = linear ^ (((linear >> 7) & SWIZZLE_BITS[_SWIZZLED_ROW[swizzle]]) << 4)
    return list(grid), mixed


class Tiles:
    """TMA of one machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def load(
        self,
        to: Array,
        to_offset: int,
        maps: Array,
        corner: tuple[Array, ...],
        barrier: Array,
        barrier_offset: int,
        mask: Array | None,
    ) -> None:
        """A tile from global to shared memory; elements beyond the tensor are zeros, and count as moved."""
        m = self.machine
        for lane in m.each(mask):
            tensor, addresses, inside, places = self._tile(lane, to, to_offset, maps, corner)
            values = np.zeros(len(places), CARRIERS[tensor.element])
            if inside.any():
                values[inside] = m.fetch(addresses[inside], tensor.element, "a tile's load", np.full(1, lane))
            m.shared[tensor.element][places] = values
            index = m.shared_index(m.full(barrier), barrier_offset, np.array([lane]), 8)
            m.barriers.came(index, len(places) * tensor.element)

    def store(self, source: Array, offset: int, maps: Array, corner: tuple[Array, ...], mask: Array | None) -> None:
        """A tile from shared to global memory; elements beyond the tensor are dropped."""
        m = self.machine
        for lane in m.each(mask):
            tensor, addresses, inside, places = self._tile(lane, source, offset, maps, corner)
            values = m.shared[tensor.element][places[inside]]
            if inside.any():
                m.put(addresses[inside], values, tensor.element, "a tile's store", np.full(1, lane))

    def _tile(
        self, lane: int, shared: Array, offset: int, maps: Array, corner: tuple[Array, ...]
    ) -> tuple[TensorMap, Array, Array, Array]:
        m = self.machine
        tensor = self._map(int(m.at(maps, lane)))
        start = int(m.at(shared, lane)) + offset
        if start % 128:
            raise Fault(f"a tile at byte {start} of shared memory is not aligned to 128", lane)
        grid, linear = _tile(tensor.box, tensor.element, tensor.swizzle, start)
        if int(linear.max()) + tensor.element > m.shared_bytes:
            raise Fault(f"a tile of {tensor.box} ends beyond the {m.shared_bytes} bytes of shared memory", lane)
        addresses = np.full(len(linear), tensor.address, np.int64)
        inside = np.ones(len(linear), bool)
        for axis, within in enumerate(grid):
            position = int(m.at(corner[axis], lane)) + within
            inside &= (position >= 0) & (position < tensor.dims[axis])
            addresses += position * tensor.strides[axis]
        places = (linear + int(m.shared_base[lane])) >> (tensor.element.bit_length() - 1)
        return tensor, addresses.view(np.uint64), inside, places

    def _map(self, address: int) -> TensorMap:
        offset = address - address_of_params()
        if 0 <= offset <= len(self.machine.params) - MAP_BYTES:
            return decode(self.machine.params[offset : offset + MAP_BYTES])
        where = np.array([address], np.uint64)
        words = np.concatenate(
            [self.machine.fetch(where + np.uint64(n), 16, "a tensor map", None) for n in range(0, 128, 16)]
        )
        return decode(words.tobytes())

    def replace(self, base: Array, offset: int, field: str, index: int, value: Array, mask: Array | None) -> None:
        """tensormap.replace: one field of the 128 bytes in shared memory."""
        m = self.machine
        for lane in m.each(mask):
            start = int(m.shared_base[lane]) + int(m.at(base, lane)) + offset
            number = int(m.at(value, lane))
            data = m.shared[1]
            data[start : start + 4] = np.frombuffer(struct.pack("<I", _MAGIC), np.uint8)
            if field == "global_address":
                where, size = 8, 8
            elif field in _FIELDS:
                first, size = _FIELDS[field]
                where = first + size * index
            elif field in ("rank", "swizzle_mode", "elemtype"):
                where, size = {"rank": 5, "swizzle_mode": 6, "elemtype": 4}[field], 1
                number = _ELEMENT_BYTES[number] if field == "elemtype" else number
            elif field in ("element_stride", "interleave_layout", "fill_mode"):
                if number not in (0, 1) or (field != "element_stride" and number):
                    raise Fault(f"a tensor map with {field} {number} is not emulated", lane)
                continue
            else:
                raise Fault(f"tensormap.replace of {field} is not emulated", lane)
            data[start + where : start + where + size] = np.frombuffer(number.to_bytes(size, "little"), np.uint8)

    def publish(self, to: Array, to_offset: int, source: Array, offset: int, mask: Array | None) -> None:
        """Copies a tensor map from shared to global memory."""
        m = self.machine
        done = set()
        for lane in m.each(mask):
            first = int(m.at(to, lane)) + to_offset
            if first in done:
                continue  # the lanes of a warp do it together
            done.add(first)
            start = int(m.shared_base[lane]) + int(m.at(source, lane)) + offset
            words = m.shared[1][start : start + MAP_BYTES].copy().view(np.complex128)
            addresses = np.uint64(first) + np.arange(0, MAP_BYTES, 16, dtype=np.uint64)
            m.put(addresses, words, 16, "a tensor map", np.full(1, lane))
