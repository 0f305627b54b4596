"""Kernels of one product side by side on this CPU: in goes a library of them, out come their times over the first's.

Launches are repeated on one copy of the weights after another, so that no cache holds them as none would in a step. The
kernels run in turn. What each takes over the first is the median over the rounds, or the ratio of the best of each
where that is larger: other programs on the machine may spoil either.
"""

import ctypes
import hashlib
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planc.compiler.ir.graph import Node
from planc.compiler.ir.packing import pack
from planc.compiler.ir.types import DTYPES, PACKED, TensorType
from planc.errors import PlancError

_ROUNDS, _LEAST_ROUNDS = 9, 3
_LONG = 4e-3  # seconds of a sample
_REPEATS = 256
_BYTES = 1 << 26  # of all copies of a weight together: more than the share of the last cache that a core has
_COPIES = 64
_PERIOD = 1_000_003  # of random numbers: drawing more takes longer than measuring
_ALIGN = 64


@dataclass(frozen=True)
class Subject:
    """A node, the types of its inputs, numbers of rows to run, and threads."""

    node: Node
    types: Sequence[TensorType]
    rows: tuple[int, ...]
    threads: int

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is allocated."""
        dims = self._dims(max(self.rows))
        return sum(t.nbytes(dims) * self._copies(t) for t in (*self.types, self.node.out.type))

    @cached_property
    def inputs(self) -> list[list[np.ndarray]]:
        """Random numbers for each input: of packed weights several copies."""
        random = np.random.default_rng(0)
        dims, out = self._dims(max(self.rows)), []
        experts = max((int(t.shape[0]) for t in self.types if t.layout in PACKED and len(t.shape) == 3), default=1)
        for t in self.types:
            first = _random(t, dims, experts, random)
            out.append([first, *(_aligned(first) for _ in range(self._copies(t) - 1))])
        return out

    @cached_property
    def output(self) -> np.ndarray:
        return _aligned(np.zeros(self.node.out.type.nbytes(self._dims(max(self.rows))), np.uint8))

    @cached_property
    def tables(self) -> ctypes.Array[ctypes.c_void_p]:
        """The buffers of a launch, a row for each copy of the weight."""
        rows = [[*(arrays[i % len(arrays)] for arrays in self.inputs), self.output] for i in range(self.copies)]
        flat = [array.ctypes.data for row in rows for array in row]
        return (ctypes.c_void_p * len(flat))(*flat)

    @property
    def copies(self) -> int:
        return max(map(self._copies, self.types))

    def _copies(self, t: TensorType) -> int:
        return max(1, min(_COPIES, math.ceil(_BYTES / t.nbytes()))) if t.layout in PACKED else 1

    @staticmethod
    def _dims(rows: int) -> dict[str, int]:
        return {"T": rows, "R": rows, "S": rows}


def race(library: ctypes.CDLL, subject: Subject, count: int, deadline: float) -> list[float | None] | None:
    """The mean over all numbers of rows of each kernel's time over the first's; None for one that has other bits, and
    for all when the deadline came first.
    """
    run = _Run(library, subject)
    same = run.same_bits(count)
    ratios: list[list[float]] = [[] for _ in range(count)]
    for rows in subject.rows:
        first = min(run.seconds(0, rows, 1) for _ in range(2))
        repeats = max(1, min(_REPEATS, int(_LONG / max(first, 1e-6))))
        rounds: list[list[float]] = []
        while len(rounds) < _ROUNDS and time.monotonic() < deadline:
            took = [0.0] * count
            for kernel in range(count):
                at = (kernel + len(rounds)) % count  # each has every place in the round
                took[at] = run.seconds(at, rows, repeats) if same[at] else 0.0
            rounds.append(took)
        if len(rounds) < _LEAST_ROUNDS:
            return None
        for kernel, found in enumerate(ratios):
            found.append(ratio_of([took[kernel] for took in rounds], [took[0] for took in rounds]))
    return [statistics.mean(found) if ok else None for found, ok in zip(ratios, same, strict=True)]


def ratio_of(some: Sequence[float], first: Sequence[float]) -> float:
    """The time of a kernel over that of the first, by their seconds in each round."""
    return max(statistics.median(a / b for a, b in zip(some, first, strict=True)), min(some) / min(first))


class _Run:
    """The kernels of a library on a subject's buffers."""

    def __init__(self, library: ctypes.CDLL, subject: Subject) -> None:
        self._subject, self._timed = subject, library.planc_timed
        number = ctypes.c_int32
        self._timed.restype = ctypes.c_int64
        self._timed.argtypes = (number, ctypes.c_void_p, number, number, number, number)

    def seconds(self, kernel: int, rows: int, repeats: int) -> float:
        """Of one launch."""
        subject = self._subject
        took = self._timed(kernel, subject.tables, subject.copies, rows, repeats, subject.threads)
        if took < 0:
            raise PlancError(f"this machine has no {subject.threads} threads left; give fewer with --threads")
        return float(took) / 1e9 / max(1, repeats)

    def same_bits(self, count: int) -> list[bool]:
        """Whether each kernel gives what the first does, whatever the number of rows."""
        found = [[self._bits(kernel, rows) for rows in self._subject.rows] for kernel in range(count)]
        return [bits == found[0] for bits in found]

    def _bits(self, kernel: int, rows: int) -> bytes:
        self._subject.output[:] = 0xFF
        self.seconds(kernel, rows, 0)
        return hashlib.sha256(self._subject.output.tobytes()).digest()


def _random(t: TensorType, dims: dict[str, int], experts: int, random: np.random.Generator) -> np.ndarray:
    dtype = DTYPES[t.dtype]
    if t.layout in PACKED:
        *stack, n, k = (int(d) for d in t.shape)
        packed = pack(np.resize(_numbers(dtype, t, experts, random), (n, k)), t.layout)
        return _aligned(np.broadcast_to(packed, (*stack, *packed.shape)))
    count = t.extent(dims) // t.itemsize
    return _aligned(np.resize(_numbers(dtype, t, experts, random), count))


def _numbers(dtype: np.dtype, t: TensorType, experts: int, random: np.random.Generator) -> np.ndarray:
    """Numbers of all that a dtype has, as weights or rows have them; of experts, each as often as any other."""
    if t.dtype == "i32":
        return random.integers(0, experts, _PERIOD).astype(dtype)
    if t.dtype in ("i8", "u4"):
        low, high = (-127, 128) if t.dtype == "i8" else (0, 16)
        return random.integers(low, high, _PERIOD).astype(dtype)
    return random.standard_normal(_PERIOD, np.float32).astype(dtype)


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy as flat bytes, whose first lies where a cache line begins."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    raw = np.empty(flat.nbytes + _ALIGN, np.uint8)
    start = -raw.ctypes.data % _ALIGN
    raw[start : start + flat.nbytes] = flat
    return raw[start : start + flat.nbytes]
