"""Checks that the edges of a graph order its launches: in go the bytes that each touches, out comes the first conflict.

Two launches of which neither waits for the other may run at once. So no byte that one of them writes may be touched by
the other. Seen in one run, whatever its order, this finds a missing edge that a lucky order would hide.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planc.emulator.memory import CARRIERS, Memory

Array = NDArray[Any]
_MOST_WATCHED = 1 << 28  # bytes of an allocation; larger ones are not watched


def random_order(deps: Sequence[Sequence[int]], rng: random.Random) -> list[int]:
    """The launches in a random order that keeps every dependency."""
    left = [set(d) for d in deps]
    ready = [n for n, d in enumerate(left) if not d]
    after: list[list[int]] = [[] for _ in deps]
    for n, d in enumerate(deps):
        for before in d:
            after[before].append(n)
    order = []
    while ready:
        n = ready.pop(rng.randrange(len(ready)))
        order.append(n)
        for later in after[n]:
            left[later].discard(n)
            if not left[later]:
                ready.append(later)
    return order


def ancestors(deps: Sequence[Sequence[int]]) -> list[int]:
    """For each launch, a bit for every launch that has ended before it."""
    found: list[int] = []
    for d in deps:
        bits = 0
        for before in d:
            bits |= found[before] | 1 << before
        found.append(bits)
    return found


@dataclass
class _Shadow:
    """A byte for each byte of an allocation that says whether it was touched."""

    start: int
    marks: Array
    low: int = 1 << 62
    high: int = 0
    typed: dict[int, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        room = len(self.marks) // 16 * 16
        self.typed = {size: self.marks[:room].view(kind) for size, kind in CARRIERS.items()}

    def mark(self, addresses: Array, size: int, low: int, high: int) -> None:
        self.low, self.high = min(self.low, low - self.start), max(self.high, high + size - self.start)
        index = (addresses - np.uint64(self.start)) >> np.uint64(size.bit_length() - 1)
        self.typed[size][index] = _ALL[size]

    def taken(self) -> Array:
        """[n, 2]: first byte and end of each run that was touched; forgets them."""
        if self.high <= self.low:
            return np.zeros((0, 2), np.int64)
        part = self.marks[self.low : self.high]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], part != 0, [0]]).astype(np.int8)))
        runs = edges.reshape(-1, 2) + (self.start + self.low)
        part[:] = 0
        self.low, self.high = 1 << 62, 0
        return runs


_ALL = {size: np.full(size, 0xFF, np.uint8).view(kind)[0] for size, kind in CARRIERS.items()}


class Touched:
    """Watches a memory, and keeps what each launch reads and writes."""

    def __init__(self, memory: Memory, ignored: Sequence[int] = ()) -> None:
        self._reads, self._writes = ([self._shadow(a, n) for a, n in _watched(memory, ignored)] for _ in range(2))
        self.launches: dict[int, tuple[Array, Array]] = {}

    @staticmethod
    def _shadow(address: int, nbytes: int) -> _Shadow:
        return _Shadow(address, np.zeros(-(-nbytes // 16) * 16, np.uint8))

    def read(self, addresses: Array, size: int) -> None:
        self._mark(self._reads, addresses, size)

    def write(self, addresses: Array, size: int) -> None:
        self._mark(self._writes, addresses, size)

    @staticmethod
    def _mark(shadows: list[_Shadow], addresses: Array, size: int) -> None:
        low, high = int(addresses.min()), int(addresses.max())
        for shadow in shadows:
            stop = shadow.start + len(shadow.marks)
            if shadow.start <= low and high < stop:
                return shadow.mark(addresses, size, low, high)
        for shadow in shadows:  # lanes in several allocations
            inside = (addresses >= shadow.start) & (addresses < shadow.start + len(shadow.marks))
            if inside.any():
                part = addresses[inside]
                shadow.mark(part, size, int(part.min()), int(part.max()))

    def end(self, launch: int) -> None:
        """What was touched since the last end was touched by this launch."""
        reads, writes = (
            np.concatenate([s.taken() for s in side] or [np.zeros((0, 2), np.int64)]) for side in self._both
        )
        self.launches[launch] = reads, writes

    @property
    def _both(self) -> tuple[list[_Shadow], list[_Shadow]]:
        return self._reads, self._writes

    def conflict(self, deps: Sequence[Sequence[int]]) -> tuple[int, int, int] | None:
        """Two launches that no edge orders, and an address that one of them writes and the other touches."""
        before = ancestors(deps)
        for later in range(len(deps)):
            for earlier in range(later):
                if before[later] >> earlier & 1 or before[earlier] >> later & 1:
                    continue
                address = self._common(earlier, later)
                if address is not None:
                    return earlier, later, address
        return None

    def _common(self, a: int, b: int) -> int | None:
        reads_a, writes_a = self.launches[a]
        reads_b, writes_b = self.launches[b]
        for one, other in ((writes_a, writes_b), (writes_a, reads_b), (reads_a, writes_b)):
            address = _overlap(one, other)
            if address is not None:
                return address
        return None


def _watched(memory: Memory, ignored: Sequence[int]) -> list[tuple[int, int]]:
    rows = memory.allocations.items()
    return [(a, n) for a, n in rows if a not in ignored and n <= _MOST_WATCHED]


def _overlap(one: Array, other: Array) -> int | None:
    """An address in both of two sets of runs; each set is sorted and its runs do not touch."""
    if not len(one) or not len(other):
        return None
    one, other = one[one[:, 0].argsort()], other[other[:, 0].argsort()]
    at = np.searchsorted(other[:, 1], one[:, 0], "right")  # the first run that ends behind the start
    inside = np.minimum(at, len(other) - 1)
    hit = (at < len(other)) & (other[inside, 0] < one[:, 1])
    if not hit.any():
        return None
    first = int(np.flatnonzero(hit)[0])
    return int(max(one[first, 0], other[inside[first], 0]))
