"""The weights of a plan as they are written: in goes a plan's weight file, out come arrays without packing, in pieces.

A piece has a bounded size, whatever the weight's, so that no weight is ever held whole.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np

from planc.compiler.ir.graph import Graph
from planc.compiler.ir.packing import BLOCK, unpack
from planc.compiler.ir.types import DTYPES, PACKED, PAIRS, TensorType
from planc.errors import PlancError
from planc.plans.schema import Plan
from planc.plans.tensors import read_header, stored

_PIECE = 32 << 20  # bytes read at a time


class Weights:
    """The weights of a graph, found in the files of its plan. PlancError names one that is not what the graph says."""

    def __init__(self, root: Path, plan: Plan, graph: Graph) -> None:
        found = {name: (root / f, entry) for f in plan.weight_files for name, entry in read_header(root / f).items()}
        self.types = {w.name: w.value.type for w in graph.weights}
        for name, t in self.types.items():
            if name not in found:
                raise PlancError(f"{root} has no weight {name}; build the plan again.")
            path, entry = found[name]
            if (entry.dtype, entry.nbytes) != (stored(t.dtype), t.nbytes()):
                raise PlancError(f"{path}: {name} is {entry.dtype} of {entry.nbytes} B, not {t}; build the plan again.")
        self._found = found

    def shape(self, name: str) -> tuple[int, ...]:
        """The logical shape."""
        return tuple(int(d) for d in self.types[name].shape)

    def nbytes(self, name: str) -> int:
        """Bytes without packing and its padding."""
        t = self.types[name]
        return TensorType(t.dtype, t.shape).nbytes()

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """The bytes of the weight in order, row-major."""
        path, entry = self._found[name]
        t = self.types[name]
        with open(path, "rb") as f:
            f.seek(entry.offset)
            if t.layout in PACKED:
                yield from _unpacked(f, t)
            else:
                yield from (_read(f, t.dtype, n) for n in _split(prod(self.shape(name)), max(1, _PIECE // t.itemsize)))


def _unpacked(f: BinaryIO, t: TensorType) -> Iterator[np.ndarray]:
    """Some blocks of output channels at a time, of one matrix after the other."""
    *stack, n, k = (int(d) for d in t.shape)
    block = TensorType(t.dtype, (BLOCK, k), t.layout).nbytes()
    for _ in range(prod(stack)):
        for rows in _split(n, BLOCK * max(1, _PIECE // block)):
            padded = rows if t.layout == PAIRS else -(-rows // BLOCK) * BLOCK
            packed = _read(f, t.dtype, padded * (block // BLOCK) // t.itemsize)
            yield unpack(packed, (rows, k), t.layout)


def _split(count: int, step: int) -> Iterator[int]:
    """`count` as parts of `step` and a rest."""
    for at in range(0, count, step):
        yield min(step, count - at)


def _read(f: BinaryIO, dtype: str, count: int) -> np.ndarray:
    return np.frombuffer(f.read(count * DTYPES[dtype].itemsize), DTYPES[dtype], count)
