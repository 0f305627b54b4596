"""Forms: in goes a tensor of the trace, out comes the graph value that holds it and where each axis lives there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from planc.compiler.ir.types import Dim, TensorType


@dataclass(frozen=True)
class Form:
    """How a graph value holds a tensor of the trace.

    `dims` is the tensor's shape in ints and symbols. `axes[i]` is the axis of the value that holds the tensor's axis i,
    or None when the value does not vary along it: axes of size 1 (the batch axis is one) and expanded ones. Axes of the
    value that no tensor axis names have size 1. So unsqueeze, squeeze, transpose and expand change `axes` alone.
    `scalar` is the number that the value holds, when the compiler knows it.
    """

    name: str
    type: TensorType
    dims: tuple[Dim, ...]
    axes: tuple[int | None, ...]
    scalar: float | None = None

    @staticmethod
    def of(name: str, type: TensorType, dims: Sequence[Dim], axes: Sequence[int | None]) -> "Form":
        """A form with axes of size 1 normalised to None."""
        axes = tuple(None if d == 1 else a for d, a in zip(dims, axes, strict=True))
        return Form(name, type, tuple(dims), axes)

    @staticmethod
    def plain(name: str, type: TensorType) -> "Form":
        """The form of a value whose axes are the tensor's own."""
        return Form.of(name, type, type.shape, range(len(type.shape)))

    @staticmethod
    def known(name: str, type: TensorType, value: Any) -> "Form":
        """The form of a constant whose value (a torch tensor) is known; a single number is remembered."""
        form = Form.plain(name, type)
        return replace(form, scalar=_number(value.item())) if value.numel() == 1 else form

    @property
    def has_rows(self) -> bool:
        """Whether the value's first axis is a token axis (T or R)."""
        return bool(self.type.shape) and isinstance(self.type.shape[0], str)

    @property
    def stored(self) -> list[int]:
        """The tensor's axes along which the value varies, in the value's order."""
        named = [(a, i) for i, a in enumerate(self.axes) if a is not None]
        return [i for _, i in sorted(named)]

    def pick(self, order: Sequence[int | None]) -> "Form":
        """The tensor with the axes `order`, None adding one of size 1; every axis left out must not be stored."""
        dims = tuple(1 if i is None else self.dims[i] for i in order)
        axes = tuple(None if i is None else self.axes[i] for i in order)
        return replace(self, dims=dims, axes=axes)

    def expand(self, dims: Sequence[Dim]) -> "Form":
        """The tensor broadcast to `dims`, aligned at the last axis."""
        axes = (None,) * (len(dims) - len(self.axes)) + self.axes
        return replace(self, dims=tuple(dims), axes=axes)


def _number(value: float) -> float:
    """Truth as a number."""
    return float(value) if isinstance(value, bool) else value


@dataclass(frozen=True)
class Mask:
    """An attention mask, known by kind ("causal", "sliding", "chunked") and size (0 for causal), never as a tensor."""

    kind: str
    size: int


@dataclass(frozen=True)
class Complex:
    """A complex tensor of the trace: its real and imaginary parts."""

    real: Form
    imag: Form
