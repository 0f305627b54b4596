"""The head of a GGUF file, every length checked against the file's size, becomes metadata and a table of tensor spans.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. gguf's own reader makes one array for each vocabulary
entry (19 s and 0.9 GB for 262144 tokens), and reads whatever lies at a damaged offset.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from planc.errors import PlancError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32, _STRING, _ARRAY, _FLOAT64 = 6, 8, 9, 12
_MAX_DIMS = 4
_F32_TENSOR = 0


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor's row-major shape, ggml type number, and span in the file (bytes)."""

    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata by key (float32 scalars rounded to their shortest decimal), tensors by name, in file order."""

    metadata: dict[str, Any]
    value_types: dict[str, int]
    tensors: dict[str, GGUFTensor]


class _Cursor:
    """Reads the head in order; a length that leaves the file is an error, not a wild read."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.position = path, path.stat().st_size, 0
        self._file = open(path, "rb")  # noqa: SIM115 - read_header closes it

    def take(self, count: int) -> bytes:
        if count > self.size - self.position:
            raise corrupt(
                self.path, f"{count} bytes announced at byte {self.position} leave the file ({self.size} bytes)"
            )
        self.position += count
        return self._file.read(count)

    def unpack(self, code: str, count: int = 1) -> tuple[Any, ...]:
        if count > self.size:
            raise corrupt(self.path, f"an array of {count} values at byte {self.position} is larger than the file")
        layout = f"<{count}{code}"
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def string(self) -> str:
        (length,) = self.unpack("Q")
        data = self.take(length)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise corrupt(self.path, f"the string at byte {self.position - length} is not UTF-8") from None

    def close(self) -> None:
        self._file.close()


def corrupt(path: Path, what: str) -> PlancError:
    """The error for a damaged file."""
    return PlancError(f"{path} is no sound GGUF file: {what}. Fetch the file again.")


def read_header(path: Path) -> GGUFHeader:
    """Parses the head of `path`; PlancError when it is not GGUF version 2 or 3, truncated or inconsistent."""
    try:
        cursor = _Cursor(path)
    except OSError as e:
        raise PlancError(f"{path} cannot be opened: {e.strerror}. Check the path and its permissions.") from None
    try:
        return _read(cursor)
    finally:
        cursor.close()


def _read(cursor: _Cursor) -> GGUFHeader:
    if cursor.size < 24 or cursor.take(4) != b"GGUF":
        raise corrupt(cursor.path, "it does not start with the magic GGUF")
    (version,) = cursor.unpack("I")
    if version not in (2, 3):
        raise corrupt(cursor.path, f"its version is {version}; 2 and 3 (little endian) are supported")
    tensor_count, value_count = cursor.unpack("Q", 2)
    metadata: dict[str, Any] = {}
    value_types: dict[str, int] = {}
    for _ in range(value_count):
        key = cursor.string()
        (value_types[key],) = cursor.unpack("I")
        metadata[key] = _value(cursor, value_types[key])
    entries = [_entry(cursor) for _ in range(tensor_count)]
    return GGUFHeader(metadata, value_types, _place(cursor, entries, metadata.get("general.alignment", 32)))


def _value(cursor: _Cursor, kind: int, depth: int = 0) -> Any:
    if kind in _SCALARS:
        (value,) = cursor.unpack(_SCALARS[kind])
        return shortest(value) if kind == _FLOAT32 else value
    if kind == _STRING:
        return cursor.string()
    if kind == _ARRAY and depth < 2:
        (element,), (count,) = cursor.unpack("I"), cursor.unpack("Q")
        if element in _SCALARS:
            return list(cursor.unpack(_SCALARS[element], count))
        if count > cursor.size:
            raise corrupt(cursor.path, f"an array of {count} values at byte {cursor.position} is larger than the file")
        return [_value(cursor, element, depth + 1) for _ in range(count)]
    raise corrupt(cursor.path, f"value type {kind} before byte {cursor.position} is unknown")


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    (rank,) = cursor.unpack("I")
    if rank > _MAX_DIMS:
        raise corrupt(cursor.path, f"tensor {name} has {rank} dimensions, at most {_MAX_DIMS} are allowed")
    dims = cursor.unpack("Q", rank)
    (kind,), (offset,) = cursor.unpack("I"), cursor.unpack("Q")
    return name, tuple(reversed(dims)), kind, offset


def _place(
    cursor: _Cursor, entries: list[tuple[str, tuple[int, ...], int, int]], alignment: Any
) -> dict[str, GGUFTensor]:
    if type(alignment) is not int or alignment < 1:
        raise corrupt(cursor.path, f"general.alignment is {alignment}")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise corrupt(cursor.path, f"tensor {name} is listed twice")
        nbytes = _byte_count(cursor.path, name, shape, kind)
        if start + offset + nbytes > cursor.size:
            raise corrupt(
                cursor.path,
                f"tensor {name} ends at byte {start + offset + nbytes}, the file at {cursor.size}: it is truncated",
            )
        tensors[name] = GGUFTensor(shape, kind, start + offset, nbytes)
    return tensors


def _byte_count(path: Path, name: str, shape: tuple[int, ...], kind: int) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise corrupt(path, f"tensor {name} has the unknown ggml type {kind}") from None
    if shape and shape[-1] % block:
        raise corrupt(path, f"tensor {name} has rows of {shape[-1]}, which blocks of {block} do not divide")
    return prod(shape) // block * size


def shortest(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 9.999999747378752e-06 becomes 1e-05."""
    return float(str(np.float32(value)))


def outline(header: GGUFHeader) -> bytes:
    """A GGUF file with the same small metadata and tensor names but no vocabulary and no data, for readers of configs.

    float32 scalars are written as float64, so that the shortest decimals survive.
    """
    kept = {key: value for key, value in header.metadata.items() if not _is_bulk(key, value)}
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(header.tensors), len(kept))]
    for key, value in kept.items():
        parts += [_packed_string(key), _packed(header.value_types[key], value)]
    for name in header.tensors:
        parts += [_packed_string(name), struct.pack("<IQIQ", 1, 1, _F32_TENSOR, 0)]
    head = b"".join(parts)
    return head + bytes(-len(head) % int(header.metadata.get("general.alignment", 32))) + bytes(4)


def _is_bulk(key: str, value: Any) -> bool:
    """Vocabularies, and nested arrays, which no config has."""
    return isinstance(value, list) and (key.startswith("tokenizer.") or any(isinstance(item, list) for item in value))


def _packed(kind: int, value: Any) -> bytes:
    if kind == _ARRAY:
        element = _element_type(value)
        body = b"".join(_body(element, item) for item in value)
        return struct.pack("<IIQ", _ARRAY, element, len(value)) + body
    kind = _FLOAT64 if kind == _FLOAT32 else kind
    return struct.pack("<I", kind) + _body(kind, value)


def _element_type(values: list[Any]) -> int:
    first = values[0] if values else 0
    if isinstance(first, str):
        return _STRING
    if isinstance(first, bool):
        return 7
    return 12 if isinstance(first, float) else 11


def _body(kind: int, value: Any) -> bytes:
    return _packed_string(value) if kind == _STRING else struct.pack(f"<{_SCALARS[kind]}", value)


def _packed_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
