"""Axes of elementwise kernels: in go an output type and its operands, out come three extents and everyone's strides."""

from collections.abc import Sequence
from dataclasses import dataclass

from planc.compiler.ir.types import TensorType

MAX_AXES = 3


@dataclass(frozen=True)
class Axes:
    """Extents of up to three feature axes, and (row, a, b, c) strides in elements of the output and of each input."""

    extent: tuple[int, ...]
    out: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]

    @property
    def tag(self) -> str:
        """The axes as part of a kernel's name: extents without ones, then strides row first."""
        sides = [self.out, *self.inputs]
        return "_".join(["x".join(map(str, self.extent)), *("s" + "o".join(map(str, s)) for s in sides)])


def fits(out: TensorType, inputs: Sequence[TensorType]) -> bool:
    """True when the operands' axes fold into three."""
    return len(_fold(_rows(out, inputs))) <= MAX_AXES


def elementwise(out: TensorType, inputs: Sequence[TensorType]) -> Axes:
    """Axes of an op that maps inputs that broadcast to `out`."""
    return _axes(out.strides()[0] if out.shape else 0, _row_strides(out, inputs), _rows(out, inputs))


def strided(extent: Sequence[int], out: Sequence[int], x: Sequence[int]) -> Axes:
    """Axes of a copy: feature extents, and (row, *feature) strides of both sides."""
    return _axes(out[0], [x[0]], list(zip(extent, out[1:], x[1:], strict=True)))


def outer(out: TensorType, inputs: Sequence[TensorType]) -> Axes:
    """Axes that reach every vector along the last axis, which a kernel walks itself; the innermost extent is 1."""
    rows = _rows(out, inputs)[:-1]
    return _axes(out.strides()[0], _row_strides(out, inputs), [*rows, (1, *(1 for _ in range(len(inputs) + 1)))])


def _axes(out_row: int, rows: Sequence[int], table: list[tuple[int, ...]]) -> Axes:
    """From one (extent, out stride, input strides..) for each feature axis."""
    width = len(rows) + 2
    inner = table[-1] if table and table[-1][0] == 1 and table[-1][1] == 1 else None
    folded = _fold(table[:-1] if inner else table)
    if inner or not folded or folded[-1][1] != 1:
        folded.append((1,) * width)  # kernels write the innermost axis densely
    folded = [(1, *(0,) * (width - 1))] * (MAX_AXES - len(folded)) + folded
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
