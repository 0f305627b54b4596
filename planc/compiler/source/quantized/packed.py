"""One quantized tensor of a checkpoint: in go readers of its codes, scales and zero points, out come floats and parts.

    w[n, k] = (codes[n, k] - zero[n, group of k]) * scale[n, group of k]

Codes are exact in float32, so that the product is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from planc.compiler.ir.quant import GROUPS, SCHEMES
from planc.compiler.ir.types import TensorType
from planc.compiler.source.base import DTYPES, PIECE, TensorInfo

Array = np.ndarray[Any, Any]
Rows = Callable[[int, int], Array]


class NotFiniteError(ValueError):
    """Codes or scales that are NaN or infinite; its text says which."""


@dataclass(frozen=True)
class Packed:
    """`shape` is [.., N, K]. Readers take a range of the first axis: codes give [n, .., K] in the dtype that the scheme
    names, scales and zeros f32 [n, .., G].

    `group` neighbours in K share a scale, or `order` i64[K] gives each column's group. `offset` is the zero point where
    it is one number, `table` the value of each code where codes are no numbers. `scheme` is None when no scheme holds
    these parts: the tensor is known by its floats alone. `dtype` is that of the floats; `transposed` says that the
    model's parameter is [.., K, N].
    """

    shape: tuple[int, ...]
    codes: Rows
    scales: Rows
    group: int
    zeros: Rows | None = None
    offset: int = 0
    order: Array | None = None
    table: Array | None = None
    scheme: str | None = None
    dtype: str = "f32"
    transposed: bool = False

    @property
    def info(self) -> TensorInfo:
        """What the floats are."""
        return TensorInfo(self.dtype, self.shape)

    @property
    def parts(self) -> dict[str, TensorInfo]:
        """Part -> what it is; empty without a scheme."""
        if self.scheme is None:
            return {}
        row, whole = SCHEMES[self.scheme], TensorType("f32", self.shape)
        types = {part: row.part_type(whole, part, held=True) for part in row.parts}
        return {part: TensorInfo(t.dtype, tuple(int(d) for d in t.shape)) for part, t in types.items()}

    def part(self, part: str, start: int = 0, stop: int | None = None) -> Array:
        """A part as the scheme has it; with a range, that of the first axis (parts of [N, K] have it in "q" alone).

        NotFiniteError for codes or scales that stand for no number.
        """
        stop = self.shape[0] if stop is None else stop
        if part == "q":
            return np.ascontiguousarray(self._checked_codes(start, stop))
        assert self.scheme is not None
        group = SCHEMES[self.scheme].group
        rows = self._checked_scales(start, stop) if part == "s" else self._zeros(start, stop)
        spread = rows.swapaxes(-1, -2)
        if group is None:
            return np.ascontiguousarray(spread[..., 0, :])
        return np.ascontiguousarray(np.repeat(spread, max(self.group // group, 1), axis=-2))

    def floats(self, start: int = 0, stop: int | None = None) -> Array:
        """A range of the floats' first axis; NotFiniteError as for `part`."""
        stop = self.shape[0] if stop is None else stop
        shape = (stop - start, *self.shape[1:])
        out = np.empty(shape, DTYPES[self.dtype])
        flat, at = out.reshape(-1, shape[-1]), 0
        for rows in self._pieces(start, stop):
            flat[at : at + len(rows)] = rows
            at += len(rows)
        return out

    def pieces(self, count: int) -> Iterator[Array]:
        """The floats in order, flat, at most `count` at a time, with the codes of all of them in memory."""
        for rows in self._pieces(0, self.shape[0]):
            flat = rows.reshape(-1).astype(DTYPES[self.dtype])
            yield from (flat[i : i + count] for i in range(0, flat.size, count))

    def _pieces(self, start: int, stop: int) -> Iterator[Array]:
        """f32 rows [n, K] in order, stacks one after another."""
        codes, scales = self._checked_codes(start, stop), self._checked_scales(start, stop)
        zeros = self._zeros(start, stop) if self.zeros else None
        k, step = self.shape[-1], max(1, PIECE // 4 // self.shape[-1])
        groups = self._groups()
        flat, s = codes.reshape(-1, k), scales.reshape(-1, scales.shape[-1])
        z = None if zeros is None else zeros.reshape(s.shape)
        for at in range(0, prod(codes.shape[:-1]), step):
            rows = slice(at, at + step)
            wide = flat[rows].astype(np.float32) if self.table is None else self.table[flat[rows]]
            if z is not None:
                _grouped(wide, z, groups)[...] -= _spread(z[rows], groups)
            elif self.offset:
                wide -= np.float32(self.offset)
            _grouped(wide, s, groups)[...] *= _spread(s[rows], groups)
            yield wide

    def _groups(self) -> Array | None:
        """Each column's group where they are not equal runs."""
        k = self.shape[-1]
        if self.order is None and k % self.group == 0:
            return None
        return np.arange(k) // self.group if self.order is None else self.order

    def _zeros(self, start: int, stop: int) -> Array:
        assert self.zeros is not None
        zeros = self.zeros(start, stop)
        if not np.isfinite(zeros).all():
            raise NotFiniteError("its zero points hold NaN or infinity")
        return zeros

    def _checked_codes(self, start: int, stop: int) -> Array:
        codes = self.codes(start, stop)
        if codes.dtype == DTYPES["f8e4m3"] and ((codes.view(np.uint8) & 0x7F) == 0x7F).any():
            raise NotFiniteError("its codes hold NaN")
        return codes

    def _checked_scales(self, start: int, stop: int) -> Array:
        scales = self.scales(start, stop)
        if not np.isfinite(scales).all():
            raise NotFiniteError("its scales hold NaN or infinity")
        return scales


def _grouped(wide: Array, rows: Array, groups: Array | None) -> Array:
    """[n, K] seen as [n, G, K/G] where groups are equal runs."""
    return wide.reshape(len(wide), rows.shape[1], -1) if groups is None else wide


def _spread(rows: Array, groups: Array | None) -> Array:
    """What stands beside `_grouped`."""
    return rows[..., None] if groups is None else rows[:, groups]


def grouped(base: str, group: int, k: int) -> str | None:
    """The scheme `base` with the widest groups that a checkpoint's groups consist of; None when it has none."""
    sizes = [g for g in GROUPS if group % g == 0 and k % g == 0]
    return f"{base}-g{sizes[0]}" if sizes else None
