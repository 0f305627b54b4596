"""Quantization schemes as rows: in goes W[.., N, K], out come its parts (codes, scales) and their types, pure numpy."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planc.compiler.ir.types import DTYPES, TensorType

_ROWS = 4096  # rows widened to float32 at a time: bounds the memory of quantizing a large weight


@dataclass(frozen=True)
class Scheme:
    """A weight-only scheme with one float32 scale per output channel: w ~ q * s."""

    name: str
    dtype: str
    limit: int

    def part_type(self, w: TensorType, part: str) -> TensorType:
        """Type of `part` ("q" codes [.., N, K], "s" scales [.., N]) of a weight of type `w`."""
        if part == "q":
            return TensorType(self.dtype, w.shape)
        if part == "s":
            return TensorType("f32", w.shape[:-1])
        raise ValueError(f"scheme {self.name} has parts q and s, not {part!r}")

    def part(self, w: np.ndarray, part: str) -> np.ndarray:
        """The array of `part`; ValueError when the weight holds NaN or infinity."""
        shape = w.shape if part == "q" else w.shape[:-1]
        out = np.empty(shape, DTYPES[self.dtype] if part == "q" else np.float32)
        for at in np.ndindex(*w.shape[:-2]):
            self._fill(w[at], part, out[at])
        return out

    def dequantize(self, q: np.ndarray, s: np.ndarray) -> np.ndarray:
        """float32 W[.., N, K] from codes and scales."""
        return q.astype(np.float32) * s[..., None]

    def _fill(self, w: np.ndarray, part: str, out: np.ndarray) -> None:
        for i in range(0, len(w), _ROWS):
            rows = w[i : i + _ROWS].astype(np.float32)
            scale = self._scale(rows)
            safe = np.where(scale == 0, np.float32(1), scale)
            out[i : i + _ROWS] = scale if part == "s" else np.rint(rows / safe[:, None])

    def _scale(self, rows: np.ndarray) -> np.ndarray:
        peak = np.abs(rows).max(axis=1)
        if not np.isfinite(peak).all():
            raise ValueError(f"scheme {self.name}: the weight holds NaN or infinity, nothing to scale by")
        return np.asarray(peak / np.float32(self.limit), np.float32)


SCHEMES: Mapping[str, Scheme] = {"int8": Scheme("int8", "i8", 127)}
