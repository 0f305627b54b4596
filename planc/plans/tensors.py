"""Aligned safetensors files: in go arrays one at a time, out comes a file that every reader opens.

Every tensor starts at a multiple of 64 bytes, which the format allows by making the filler tensors of their own: it
wants the data without holes.
"""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from planc.errors import PlancError

ALIGN = 64
_PAD = "__pad__."
_NAMES = {n: n.upper() for n in ("f32", "f16", "bf16", "i8", "u8", "i32", "i64", "bool")} | {"f8e4m3": "F8_E4M3"}
_STORED = {"u4": "u8"}  # codes of 4 bits are packed, two in a byte
_MAX_HEADER = 100 << 20  # the format's own limit


def stored(dtype: str) -> str:
    """The dtype of a file's entry that holds a tensor of `dtype`."""
    return _STORED.get(dtype, dtype)


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: where its bytes are, counted from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, Entry]:
    """Entries by name, fillers left out; PlancError when the file is no safetensors file or is cut short."""
    try:
        with open(path, "rb") as f:
            head = f.read(8)
            (size,) = struct.unpack("<Q", head)
            if size > _MAX_HEADER:
                raise ValueError(f"header of {size} bytes")
            table = json.loads(f.read(size))
        end = path.stat().st_size
        base = 8 + size
        entries = [_entry(name, row, base) for name, row in table.items() if name != "__metadata__"]
    except FileNotFoundError:
        raise PlancError(f"{path} is missing; the plan is not whole. Build or pack it again.") from None
    except (ValueError, KeyError, TypeError, struct.error) as e:
        raise PlancError(f"{path} is not a safetensors file ({e}). Build the plan again.") from None
    if any(e.offset + e.nbytes > end for e in entries):
        raise PlancError(f"{path} is cut short: it has {end} bytes, its header asks for more. Build the plan again.")
    return {e.name: e for e in entries if not e.name.startswith(_PAD)}


def _entry(name: str, row: dict[str, Any], base: int) -> Entry:
    dtypes = {v: k for k, v in _NAMES.items()}
    start, stop = row["data_offsets"]
    return Entry(name, dtypes[row["dtype"]], tuple(row["shape"]), base + start, stop - start)


class Writer:
    """Writes a file whose tensors are known beforehand, one array at a time and in that order."""

    def __init__(self, path: Path, tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> None:
        """`tensors` are (name, dtype, shape, bytes); the header goes out at once."""
        self._queue: list[tuple[str, int]] = []
        header: dict[str, object] = {}
        at = 0
        for name, dtype, shape, nbytes in tensors:
            header[name] = {
                "dtype": _NAMES[stored(dtype)],
                "shape": list(shape),
                "data_offsets": [at, at + nbytes],
            }
            self._queue.append((name, nbytes))
            at += nbytes
            if fill := -at % ALIGN:
                header[f"{_PAD}{len(header)}"] = {"dtype": "U8", "shape": [fill], "data_offsets": [at, at + fill]}
                at += fill
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGN)
        self._next = 0
        self._file = open(path, "wb")  # noqa: SIM115 (closed by __exit__)
        self._file.write(struct.pack("<Q", len(text)) + text)

    def write(self, name: str, array: np.ndarray) -> None:
        """The bytes of the next tensor; ValueError when it is not the one that the header announced."""
        self.write_pieces(name, [array])

    def write_pieces(self, name: str, arrays: Iterable[np.ndarray]) -> None:
        """The bytes of the next tensor, in order; ValueError when they are not those that the header announced."""
        want, nbytes = self._queue[self._next]
        written = 0
        for array in arrays:
            self._file.write(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
            written += array.nbytes
        if name != want or written != nbytes:
            raise ValueError(f"tensor {name} of {written} bytes, the header has {want} of {nbytes}")
        self._next += 1
        self._file.write(b"\0" * (-nbytes % ALIGN))

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()
        if kind is None and self._next != len(self._queue):
            raise ValueError(f"{len(self._queue) - self._next} tensors were announced and never written")
