"""Device memory on the host: in go sizes, out come addresses; reads and writes of many lanes, each one checked.

An address is the host's own address of a reserved span, so that copies and kernels agree on it. Its upper 16 bits may
carry a tag, which pointer arithmetic keeps: a launch tags each pointer that it passes, so that an access is held to the
buffer that its pointer was of. Memory that was never written holds 0xCB in every byte.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from planc.errors import PlancError

Array = NDArray[Any]
GRAIN = 256  # bytes that the driver rounds an allocation up to
_GUARD = 4096  # bytes between allocations, which nobody may touch
_POISON = 0xCB
_POISONED_UP_TO = 1 << 28  # larger ones stay untouched, so that they cost no memory
_TAG = 48  # bits of an address below its tag
_PLAIN = np.uint64((1 << _TAG) - 1)
_NORESERVE = 0x4000  # MAP_NORESERVE of Linux
# Bytes of one access -> the type that moves them.
CARRIERS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class Fault(Exception):
    """An access that a GPU would refuse or must not make; `lane` is the position of the first wrong address."""

    def __init__(self, message: str, lane: int | None = None) -> None:
        super().__init__(message)
        self.lane = lane


def tagged(address: int, tag: int) -> int:
    """An address that says which pointer it came from, 0 for none."""
    return address | tag << _TAG


class OutOfMemory(Exception):
    """An allocation beyond what the device has left."""


class Watcher(Protocol):
    """Sees every access of global memory: addresses and bytes each, without those of inactive lanes."""

    def read(self, addresses: Array, size: int) -> None: ...
    def write(self, addresses: Array, size: int) -> None: ...


class Spans:
    """Sorted spans of addresses that do not overlap, with names for errors."""

    def __init__(self, spans: Sequence[tuple[int, int, str]]) -> None:
        merged: list[tuple[int, int, str]] = []
        for start, stop, name in sorted(spans):
            if merged and start < merged[-1][1]:
                last = merged[-1]
                merged[-1] = (last[0], max(last[1], stop), last[2] if name in last[2] else f"{last[2]}, {name}")
            else:
                merged.append((start, stop, name))
        self.rows = merged
        self._starts = np.array([s for s, _, _ in merged], np.uint64)
        self._stops = np.array([e for _, e, _ in merged], np.uint64)
        self._last = (0, 0)

    def check(self, addresses: Array, size: int, what: str) -> None:
        """Raises Fault when an access of `size` bytes is not whole within one span, or not aligned to its size."""
        low, high = int(addresses.min()), int(addresses.max())
        if size > 1 and int(np.bitwise_or.reduce(addresses)) & (size - 1):
            lane = int(np.flatnonzero(addresses & np.uint64(size - 1))[0])
            raise Fault(f"{what} of {size} bytes at 0x{int(addresses[lane]):x} is not aligned", lane)
        if self._last[0] <= low and high + size <= self._last[1]:
            return
        at = np.searchsorted(self._starts, addresses, "right").astype(np.int64) - 1
        if not len(self.rows):
            raise Fault(f"{what} of {size} bytes at 0x{low:x}: no memory is allocated", 0)
        wrong = (at < 0) | (addresses + np.uint64(size) > self._stops[np.maximum(at, 0)])
        if wrong.any():
            lane = int(np.flatnonzero(wrong)[0])
            raise Fault(f"{what} of {size} bytes {self._where(int(addresses[lane]))}", lane)
        first, last = int(at.min()), int(at.max())
        if first == last:
            self._last = self.rows[first][0], self.rows[first][1]

    def _where(self, address: int) -> str:
        place = f"at 0x{address & int(_PLAIN):x}"
        row = self.rows[max(bisect.bisect_right([start for start, _, _ in self.rows], address) - 1, 0)]
        if address >> _TAG != row[0] >> _TAG:
            return f"{place} is by no pointer of the launch"
        return f"{place} lies outside of its memory: byte {address - row[0]} of {row[2]}, which has {row[1] - row[0]}"


class Memory:
    """`total` bytes of device memory. Not for use by two threads at once."""

    def __init__(self, total: int) -> None:
        self.total, self.used = total, 0
        self.allocations: dict[int, int] = {}
        self.watcher: Watcher | None = None
        span = 2 * total + (1 << 24)  # guards and freed places take addresses, no memory
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        try:
            self._map = mmap.mmap(-1, span, flags=flags)
        except OSError as e:
            raise PlancError(f"{span} bytes of addresses for the emulated device cannot be reserved ({e})") from e
        self.base = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        self._next = _GUARD
        self._typed = {size: np.frombuffer(self._map, kind) for size, kind in CARRIERS.items()}
        self._spans: Spans | None = None
        self.peers: list[Memory] = []  # of other devices, that this one's kernels may touch
        self.stores = 0  # that were done

    def alloc(self, nbytes: int, name: str = "") -> int:
        """The address of fresh memory. OutOfMemory when the device has less left."""
        taken = -(-nbytes // GRAIN) * GRAIN
        if self.used + taken > self.total or self._next + taken + _GUARD > len(self._map):
            raise OutOfMemory(f"{nbytes} bytes were asked for, {self.total - self.used} are free")
        address = self.base + self._next
        self._next = -(-(self._next + taken + _GUARD) // _GUARD) * _GUARD
        self.used += taken
        self.allocations[address] = nbytes
        self._spans = None
        if nbytes <= _POISONED_UP_TO:
            ctypes.memset(address, _POISON, nbytes)
        return address

    def free(self, address: int) -> bool:
        """Gives memory back; False when nothing starts there."""
        nbytes = self.allocations.pop(address, None)
        if nbytes is None:
            return False
        self.used -= -(-nbytes // GRAIN) * GRAIN
        self._spans = None
        page = mmap.PAGESIZE
        first, last = -(-(address - self.base) // page) * page, (address - self.base + nbytes) // page * page
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
        return True

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether an allocation holds all these bytes."""
        starts = sorted(self.allocations)
        at = bisect.bisect_right(starts, address) - 1
        return at >= 0 and address + nbytes <= starts[at] + self.allocations[starts[at]]

    @property
    def spans(self) -> Spans:
        """Everything that is allocated, here and on the devices whose memory can be touched from here."""
        if self._spans is None or self.peers:
            rows = [
                (a, a + n, f"an allocation of {n} bytes") for m in (self, *self.peers) for a, n in m.allocations.items()
            ]
            self._spans = Spans(rows)
        return self._spans

    def put(self, array: Array) -> int:
        """The address of a copy of an array."""
        address = self.alloc(array.nbytes)
        self.set(address, array)
        return address

    def set(self, address: int, array: Array) -> None:
        """Copies an array to an address."""
        data = np.ascontiguousarray(array)
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def get(self, address: int, shape: tuple[int, ...], kind: Any) -> Array:
        """A copy of what lies at an address."""
        out = np.empty(shape, kind)
        ctypes.memmove(out.ctypes.data, address, out.nbytes)
        return out

    def take(self, addresses: Array, size: int) -> Array:
        """Elements of `size` bytes as their carrier type. The caller has checked them."""
        addresses = addresses & _PLAIN
        if self.peers and not self._own(addresses).all():
            values = np.empty(addresses.size, CARRIERS[size])
            for memory, lanes in self._apart(addresses):
                values[lanes] = memory.take(addresses[lanes], size)
            return values
        if self.watcher is not None:
            self.watcher.read(addresses, size)
        return self._typed[size][self._index(addresses, size)]

    def store(self, addresses: Array, values: Array, size: int) -> None:
        """Writes elements of `size` bytes; where addresses repeat, one of them wins."""
        addresses = addresses & _PLAIN
        if self.peers and not self._own(addresses).all():
            for memory, lanes in self._apart(addresses):
                memory.store(addresses[lanes], values if values.size == 1 else values[lanes], size)
            return
        self.stores += 1
        if self.watcher is not None:
            self.watcher.write(addresses, size)
        self._typed[size][self._index(addresses, size)] = values

    def _own(self, addresses: Array) -> Array:
        return (addresses >= np.uint64(self.base)) & (addresses < np.uint64(self.base + len(self._map)))

    def _apart(self, addresses: Array) -> Iterator[tuple[Memory, Array]]:
        """The lanes of each device's memory. Its own launches are what a watcher of memory watches, not its peers'."""
        for memory in (self, *self.peers):
            lanes = np.flatnonzero(memory._own(addresses))
            if lanes.size:
                watcher, memory.watcher = memory.watcher, memory.watcher if memory is self else None
                try:
                    yield memory, lanes
                finally:
                    memory.watcher = watcher

    def _index(self, addresses: Array, size: int) -> Array:
        offsets = addresses - np.uint64(self.base)
        return (offsets >> np.uint64(size.bit_length() - 1)).view(np.int64)
