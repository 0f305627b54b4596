"""What lanes of a warp tell each other: in go values of all lanes, out come shuffles, votes and reductions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_LANE = np.arange(32)


class WarpOps:
    """`lanes` lanes in thread blocks of `threads`, 32 a warp."""

    def __init__(self, threads: int, lanes: int) -> None:
        self.threads, self.lanes = threads, lanes

    def full(self, value: Array) -> Array:
        """A value with one element a lane, contiguous."""
        if value.size == self.lanes:
            return value
        return np.ascontiguousarray(np.broadcast_to(value, (self.lanes,)))

    def _warps(self, value: Array) -> Array:
        return self.full(value).reshape(-1, 32)

    def shuffle(self, value: Array, mode: str, by: int, clamp: int) -> tuple[Array, Array]:
        """shfl.sync by a constant: the values, and which of them came from another lane in reach."""
        source, reached = _sources(mode, by, clamp)
        values = np.take(self._warps(value), source, axis=1).reshape(-1)
        return values, np.tile(reached, self.lanes // 32)

    def shuffle_by(self, value: Array, mode: str, by: Array, clamp: Array) -> tuple[Array, Array]:
        """shfl.sync by a register."""
        source, reached = _source(mode, self._warps(by & 31).astype(np.int64), self._warps(clamp).astype(np.int64))
        values = np.take_along_axis(self._warps(value), source, axis=1)
        return values.reshape(-1), reached.reshape(-1)

    def reduce(self, value: Array, operation: str, mask: Array | None) -> Array:
        """redux.sync over the lanes of the mask; fmin and fmax pass over NaN."""
        functions: dict[str, Any] = {"add": np.add, "min": np.minimum, "max": np.maximum}
        functions |= {"fmin": np.fmin, "fmax": np.fmax}
        functions |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
        values = self._warps(value)
        if mask is not None:
            values = np.where(self._warps(mask), values, _neutral(operation, values.dtype))
        result = functions[operation].reduce(values, axis=1, dtype=values.dtype)
        return np.repeat(result, 32)

    def vote(self, value: Array, mode: str, mask: Array | None) -> Array:
        """vote.sync over the lanes of the mask."""
        values = self._warps(value)
        taking = np.ones_like(values) if mask is None else self._warps(mask)
        if mode == "ballot":
            bits = (values & taking) << np.arange(32, dtype=np.uint64)
            return np.repeat(bits.sum(1).astype(np.uint32), 32)
        every, some = (values | ~taking).all(1), (values & taking).any(1)
        return np.repeat({"all": every, "any": some, "uni": every | ~some}[mode], 32)

    def elect(self, mask: Array | None) -> tuple[Array, Array]:
        """elect.sync: the first lane of each warp that takes part, and whether a lane is that one."""
        taking = np.ones((self.lanes // 32, 32), bool) if mask is None else self._warps(mask)
        first = taking.argmax(1)
        return np.repeat(first.astype(np.uint32), 32), (first[:, None] == _LANE).reshape(-1) & taking.reshape(-1)


def _source(mode: str, by: Array, clamp: Array) -> tuple[Array, Array]:
    bound, segment = clamp & 31, clamp >> 8 & 31
    lowest = _LANE & segment
    highest = lowest | (bound & ~segment)
    source = {"up": _LANE - by, "down": _LANE + by, "bfly": _LANE ^ by, "idx": lowest | (by & ~segment)}[mode]
    reached = source >= highest if mode == "up" else source <= highest
    return np.where(reached, source, _LANE), reached


@lru_cache(maxsize=256)
def _sources(mode: str, by: int, clamp: int) -> tuple[Array, Array]:
    return _source(mode, np.array(by), np.array(clamp))


def _neutral(operation: str, kind: Any) -> Any:
    if operation in ("add", "or", "xor"):
        return kind.type(0)
    if operation == "and":
        return ~kind.type(0)
    if kind.kind == "f":
        return kind.type(np.inf if operation.endswith("min") else -np.inf)
    limits = np.iinfo(kind)
    return kind.type(limits.max if operation == "min" else limits.min)
