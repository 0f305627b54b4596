"""ONNX files written in bounded memory: in go a model without weights and a reader of them, out come one file or two.

A protobuf message is its fields one after the other, each behind its length. The lengths of weights are known before
their bytes are, so the file is written from front to back, a piece of a weight at a time. What exceeds a protobuf's
2 GB goes to a file beside it, which the model names.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto

from planc.compiler.onnx_export.emitter import ELEMENT
from planc.compiler.onnx_export.weights import Weights

INLINE_LIMIT = (2 << 30) - (1 << 20)  # bytes of a model file; protobuf ends at 2 GiB
_ALIGN = 4096  # of a weight in the data file, so that it can be mapped
_SMALL = 1024  # bytes of weights that stay in the model file in any case
_BYTES = 2  # the wire type of a field behind its length
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9  # fields of ModelProto, GraphProto, TensorProto

Report = Callable[[int], None]


@dataclass(frozen=True)
class Layout:
    """Which weights lie in the model file, and where in the data file the others do."""

    inline: tuple[str, ...]
    offsets: dict[str, int]

    @property
    def external(self) -> bool:
        """Whether there is a data file."""
        return bool(self.offsets)


def layout(weights: Weights, graph: GraphProto) -> Layout:
    """All in one file when that stays below the limit, else the large weights apart."""
    names = tuple(weights.types)
    total = graph.ByteSize() + sum(weights.nbytes(n) + len(n) + 64 for n in names)
    if total <= INLINE_LIMIT:
        return Layout(names, {})
    at, offsets = 0, {}
    for name in names:
        if weights.nbytes(name) > _SMALL:
            offsets[name] = at
            at += -(-weights.nbytes(name) // _ALIGN) * _ALIGN
    return Layout(tuple(n for n in names if n not in offsets), offsets)


def write_data(f: BinaryIO, weights: Weights, plan: Layout, report: Report) -> None:
    """The data file: every weight at its offset."""
    for name, offset in plan.offsets.items():
        f.write(b"\0" * (offset - f.tell()))
        _pour(f, weights.pieces(name), report)


def write_model(
    f: BinaryIO, header: ModelProto, graph: GraphProto, weights: Weights, plan: Layout, data_name: str, report: Report
) -> None:
    """The model file; `data_name` is the data file's name beside it."""
    body = graph.SerializeToString(deterministic=True)
    outside = b"".join(_message(_INITIALIZER, _external(n, weights, at, data_name)) for n, at in plan.offsets.items())
    heads = {name: _head(name, weights) for name in plan.inline}
    sizes = {name: len(heads[name]) + weights.nbytes(name) for name in plan.inline}
    total = len(body) + len(outside) + sum(len(_key(_INITIALIZER, size)) + size for size in sizes.values())
    f.write(header.SerializeToString(deterministic=True) + _key(_GRAPH, total) + body + outside)
    for name in plan.inline:
        f.write(_key(_INITIALIZER, sizes[name]) + heads[name])
        _pour(f, weights.pieces(name), report)


def _pour(f: BinaryIO, pieces: Iterator[np.ndarray], report: Report) -> None:
    for piece in pieces:
        f.write(np.ascontiguousarray(piece).view(np.uint8).reshape(-1).data)
        report(piece.nbytes)


def _described(name: str, weights: Weights) -> TensorProto:
    return TensorProto(name=name, data_type=ELEMENT[weights.types[name].dtype], dims=weights.shape(name))


def _head(name: str, weights: Weights) -> bytes:
    """A tensor's message up to its bytes."""
    return _described(name, weights).SerializeToString(deterministic=True) + _key(_RAW_DATA, weights.nbytes(name))


def _external(name: str, weights: Weights, offset: int, data_name: str) -> bytes:
    tensor = _described(name, weights)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", data_name), ("offset", offset), ("length", weights.nbytes(name))):
        tensor.external_data.add(key=key, value=str(value))
    return tensor.SerializeToString(deterministic=True)


def _message(number: int, content: bytes) -> bytes:
    return _key(number, len(content)) + content


def _key(number: int, length: int) -> bytes:
    """A field's number and the length of what follows."""
    return _varint(number << 3 | _BYTES) + _varint(length)


def _varint(n: int) -> bytes:
    """Seven bits a byte, low ones first; the top bit says that more follow."""
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes((*out, n))
