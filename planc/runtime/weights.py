"""Packed weights: safetensors files go in, the addresses of their tensors in shared read-only mappings come out."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from planc.errors import PlancError
from planc.plans.tensors import ALIGN, read_header


class MappedWeights:
    """A weight file mapped into memory: nothing is read until used, and processes share the pages.

    Raises PlancError when the file is missing, cut short, no safetensors file, or holds a tensor off a 64-byte bound.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries = read_header(path)
        for entry in self._entries.values():
            if entry.offset % ALIGN:
                raise PlancError(
                    f"{path}: tensor {entry.name!r} starts at byte {entry.offset}, expected a multiple of {ALIGN}. "
                    "Build the plan again."
                )
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as e:
            raise PlancError(f"{path}: cannot be mapped ({e}). Build the plan again.") from e
        self._map.madvise(mmap.MADV_WILLNEED)
        self._base = int(np.frombuffer(self._map, np.uint8).ctypes.data)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def release(self) -> None:
        """Gives the resident pages back; they are mapped again when used, so a step that runs meanwhile only slows."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def address(self, name: str) -> int:
        """The memory address of a tensor's first byte, a multiple of 64."""
        return self._base + self._entries[name].offset

    def nbytes(self, name: str) -> int:
        """The bytes of a tensor."""
        return self._entries[name].nbytes


def addresses(files: Iterable[MappedWeights], names: Iterable[str]) -> list[int]:
    """The address of each named tensor, whichever file holds it."""
    files = list(files)
    found: list[int] = []
    for name in names:
        owner = next((file for file in files if name in file), None)
        if owner is None:
            where = ", ".join(str(file.path) for file in files)
            raise PlancError(f"{where}: tensor {name!r} is missing. Build the plan again.")
        found.append(owner.address(name))
    return found
