"""Axes of elementwise kernels: in go an output type and its operands, out come extents and everyone's strides."""

from collections.abc import Sequence
from dataclasses import dataclass

from planc.compiler.ir.types import TensorType

_AXES = 3  # at least: kernels of few axes then differ in numbers only


@dataclass(frozen=True)
class Axes:
    """Extents of the feature axes, and (row, a, b, c) strides in elements of the output and of each input."""

    extent: tuple[int, ...]
    out: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]

    @property
    def tag(self) -> str:
        """The axes as part of a kernel's name: extents without ones, then strides row first."""
        sides = [self.out, *self.inputs]
        return "_".join(["x".join(map(str, self.extent)), *("s" + "o".join(map(str, s)) for s in sides)])


def elementwise(out: TensorType, inputs: Sequence[TensorType]) -> Axes:
    """Axes of an op that maps inputs that broadcast to `out`."""
    return _axes(out.strides()[0] if out.shape else 0, _row_strides(out, inputs), _rows(out, inputs))


def strided(extent: Sequence[int], out: Sequence[int], x: Sequence[int]) -> Axes:
    """Axes of a copy: feature extents, and (row, *feature) strides of both sides."""
    return _axes(out[0], [x[0]], list(zip(extent, out[1:], x[1:], strict=True)))


def outer(out: TensorType, inputs: Sequence[TensorType], *, inner: int = 1) -> Axes:
    """Axes that reach every vector along the last axis (or last `inner` axes), which a kernel walks itself.

    The innermost extent is 1.
    """
    return _axes(out.strides()[0], _row_strides(out, inputs), _rows(out, inputs)[:-inner], walked=True)


def _axes(out_row: int, rows: Sequence[int], table: list[tuple[int, ...]], *, walked: bool = False) -> Axes:
    """From one (extent, out stride, input strides..) for each feature axis; `walked` leaves no innermost one."""
    width = len(rows) + 2
    folded = _fold(table)
    if walked or not folded or folded[-1][1] != 1:
        folded.append((1,) * width)  # kernels write the innermost axis densely
    folded = [(1, *(0,) * (width - 1))] * (_AXES - len(folded)) + folded
    extent, out, *inputs = (tuple(column) for column in zip(*folded, strict=True))
    return Axes(extent, (out_row, *out), tuple((r, *s) for r, s in zip(rows, inputs, strict=True)))


def _fold(table: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Drops axes of extent 1 and joins neighbours that every side walks as one."""
    folded: list[tuple[int, ...]] = []
    for axis in table:
        if axis[0] == 1:
            continue
        if folded and all(a == axis[0] * b for a, b in zip(folded[-1][1:], axis[1:], strict=True)):
            folded[-1] = (folded[-1][0] * axis[0], *axis[1:])
        else:
            folded.append(axis)
    return folded


def _rows(out: TensorType, inputs: Sequence[TensorType]) -> list[tuple[int, ...]]:
    """(extent, out stride, input strides..) of each feature axis of `out`."""
    sides = [out.strides()[1:], *(_aligned(out, t)[1:] for t in inputs)]
    return [(int(d), *(s[i] for s in sides)) for i, d in enumerate(out.shape[1:])]


def _row_strides(out: TensorType, inputs: Sequence[TensorType]) -> list[int]:
    return [_aligned(out, t)[0] if out.shape else 0 for t in inputs]


def _aligned(out: TensorType, t: TensorType) -> tuple[int, ...]:
    """Strides of `t` along every axis of `out`: 0 where `t` broadcasts."""
    missing = len(out.shape) - len(t.shape)
    own = [0 if d == 1 else s for d, s in zip(t.shape, t.strides(), strict=True)]
    return (*(0,) * missing, *own)
