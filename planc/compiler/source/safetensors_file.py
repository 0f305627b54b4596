"""A .safetensors file, its header checked against its size, becomes a table of tensors that are read by offset."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from planc.compiler.source.base import DTYPES, TensorInfo
from planc.compiler.source.files import SpanReader
from planc.errors import PlancError

# The format's own bound on the header, https://github.com/huggingface/safetensors#format
_MAX_HEADER = 100_000_000
_NAMES = {
    "F64": "f64",
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "F8_E4M3": "f8e4m3",
    "F8_E5M2": "f8e5m2",
    "F8_E8M0": "f8e8m0",
    "I64": "i64",
    "I32": "i32",
    "I16": "i16",
    "I8": "i8",
    "U8": "u8",
    "BOOL": "bool",
}


class SafetensorsFile:
    """`tensors` by name, and `read(name)`. Opening raises PlancError for an empty, truncated or corrupt file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = SpanReader(path)
        try:
            header, self._base = self._header()
            self.tensors: dict[str, TensorInfo] = {}
            self._spans: dict[str, tuple[int, int]] = {}
            for name, entry in header.items():
                if name != "__metadata__":
                    self._add(name, entry)
            self._check_coverage()
        except BaseException:
            self._file.close()
            raise

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """One tensor, in a buffer of its own."""
        info, (begin, end) = self.tensors[name], self._spans[name]
        return self._file.read(self._base + begin, end - begin).view(DTYPES[info.dtype]).reshape(info.shape)

    def read_pieces(self, name: str, count: int) -> Iterator[np.ndarray[Any, Any]]:
        """The tensor's elements in order, flat, at most `count` at a time, each piece read on its own."""
        (begin, end), dtype = self._spans[name], DTYPES[self.tensors[name].dtype]
        step = count * dtype.itemsize
        for start in range(begin, end, step):
            yield self._file.read(self._base + start, min(step, end - start)).view(dtype)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        """`read(name)[start:stop]`, reading those rows alone."""
        info, begin = self.tensors[name], self._spans[name][0]
        shape = (stop - start, *info.shape[1:])
        row = info.nbytes // info.shape[0]
        read = self._file.read(self._base + begin + start * row, (stop - start) * row)
        return read.view(DTYPES[info.dtype]).reshape(shape)

    def close(self) -> None:
        self._file.close()

    def _header(self) -> tuple[dict[str, Any], int]:
        size = self._file.size
        if size < 8:
            raise self._corrupt(f"has {size} bytes, and the header's length alone takes 8")
        length = int(self._file.read(0, 8).view("<u8")[0])
        if length > min(_MAX_HEADER, size - 8):
            raise self._corrupt(f"announces a header of {length} bytes in a file of {size}")
        try:
            header = json.loads(self._file.read(8, length).tobytes())
        except ValueError as e:
            raise self._corrupt(f"has a header that is not JSON ({e})") from None
        if not isinstance(header, dict):
            raise self._corrupt("has a header that is not a JSON object")
        return header, 8 + length

    def _add(self, name: str, entry: Any) -> None:
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            numbers = [*shape, begin, end]
        except (TypeError, KeyError, ValueError):
            raise self._corrupt(f"describes tensor {name} without dtype, shape and data_offsets") from None
        if not all(type(n) is int and n >= 0 for n in numbers):
            raise self._corrupt(f"gives tensor {name} a shape or offsets that are not natural numbers: {entry}")
        if dtype not in _NAMES:
            raise PlancError(f"{self.path}: tensor {name} has dtype {dtype}; supported are {', '.join(_NAMES)}.")
        info = TensorInfo(_NAMES[dtype], shape)
        if end - begin != info.nbytes:
            raise self._corrupt(f"gives tensor {name} {end - begin} bytes, {dtype}{list(shape)} takes {info.nbytes}")
        if self._base + end > self._file.size:
            raise PlancError(
                f"{self.path} is truncated: tensor {name} ends at byte {self._base + end}, "
                f"the file at {self._file.size}. Fetch the file again."
            )
        self.tensors[name], self._spans[name] = info, (begin, end)

    def _check_coverage(self) -> None:
        """Tensors must tile the data section, as the format demands: overlap or a gap means a damaged header."""
        position = 0
        for name, (begin, end) in sorted(self._spans.items(), key=lambda item: item[1]):
            if begin != position:
                raise self._corrupt(f"places tensor {name} at byte {begin}, {position} was expected")
            position = end
        if self._base + position != self._file.size:
            raise self._corrupt(f"has {self._file.size} bytes, its header describes {self._base + position}")

    def _corrupt(self, what: str) -> PlancError:
        return PlancError(f"{self.path} is corrupt: it {what}. Fetch the file again.")
