"""Narrow floats: in go arrays of bit patterns or float32, out comes the other, rounded as the hardware rounds."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_NARROW = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "f16": 65504.0, "bf16": 3.3895313892515355e38}
# Value of each of the 256 codes.
_BYTES = {
    "e4m3": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "e5m2": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float32),
    "s8": np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32),
    "u8": np.arange(256, dtype=np.uint8).astype(np.float32),
}
SIZE = {"f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1, "tf32": 4}


def widen(bits: Array, kind: str) -> Array:
    """float32 values of bit patterns (uint8, uint16 or uint32), exact. tf32 drops the 13 bits that it has not."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind == "f16":
        return bits.view(np.float16).astype(np.float32)
    if kind == "tf32":
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)
    values: Array = _BYTES[kind][bits]
    return values


def narrow(values: Array, kind: str, *, finite: bool = False, down: bool = False) -> Array:
    """Bit patterns of values, to nearest even; `finite` clips to the largest finite value, `down` rounds to zero."""
    if down:
        values = _toward_zero(values, kind)
    if finite:
        values = np.clip(values, -_LARGEST[kind], _LARGEST[kind])
    bits = np.ascontiguousarray(values.astype(_NARROW[kind]))
    return bits.view(np.uint8 if bits.itemsize == 1 else np.uint16)


def _toward_zero(values: Array, kind: str) -> Array:
    if kind != "bf16":
        raise NotImplementedError(f"rounding to zero as {kind}")
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return np.where(np.isnan(values), bits, bits & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)


def unpack(bits: Array, kind: str) -> Array:
    """float32 [n, 2] of two values a register: uint16 for bytes, uint32 for 16-bit floats, uint64 for f32."""
    bits = np.ascontiguousarray(bits)
    if kind == "f32":
        return bits.view(np.float32).reshape(-1, 2)
    part = np.uint8 if SIZE[kind] == 1 else np.uint16
    return widen(bits.view(part).reshape(-1, 2), kind)


def pack(values: Array, kind: str, *, finite: bool = False, down: bool = False) -> Array:
    """The inverse of `unpack`: one register of two values; the first is the low half."""
    if kind == "f32":
        return np.ascontiguousarray(values, np.float32).view(np.uint64).reshape(-1)
    bits = np.ascontiguousarray(narrow(values, kind, finite=finite, down=down))
    return bits.view(np.uint16 if bits.itemsize == 1 else np.uint32).reshape(-1)
