"""ATen ops that only move elements: in go recipes of the operands and the results' shapes, out come their recipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from planc.compiler.ir.recipe import Recipe, cast, infer, step

TORCH = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "f8e8m0": torch.float8_e8m0fnu,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in TORCH.items()}
Move = Callable[..., list[Recipe]]


class UnknownMoveError(Exception):
    """An op that is not in `MOVES`; its text is the op's name."""


def _shape(recipe: Recipe) -> tuple[int, ...]:
    return tuple(int(d) for d in infer(recipe).shape)


def _reshape(recipe: Recipe, shape: Sequence[int]) -> Recipe:
    if _shape(recipe) == tuple(shape):
        return recipe
    return step("reshape", recipe, shape=tuple(shape))


def _slice(recipe: Recipe, axis: int, start: int, stop: int) -> Recipe:
    if (start, stop) == (0, _shape(recipe)[axis]):
        return recipe
    return step("slice", recipe, axis=axis, start=start, stop=stop)


def _permute(recipe: Recipe, perm: Sequence[int]) -> Recipe:
    if list(perm) == sorted(perm):
        return recipe
    return step("transpose", recipe, perm=tuple(perm))


def _same(inputs: list[Recipe], out: torch.Tensor, *_: Any) -> list[Recipe]:
    return inputs


def _view(inputs: list[Recipe], out: torch.Tensor, *_: Any) -> list[Recipe]:
    return [_reshape(inputs[0], out.shape)]


def _cast(inputs: list[Recipe], out: torch.Tensor, *_: Any) -> list[Recipe]:
    return [cast(inputs[0], _NAMES[out.dtype])]


def _transpose(inputs: list[Recipe], out: torch.Tensor, first: int = -2, second: int = -1) -> list[Recipe]:
    perm = list(range(out.dim()))
    perm[first], perm[second] = perm[second], perm[first]
    return [_permute(inputs[0], perm)]


def _permuted(inputs: list[Recipe], out: torch.Tensor, perm: Sequence[int]) -> list[Recipe]:
    return [_permute(inputs[0], [axis % out.dim() for axis in perm])]


def _sliced(
    inputs: list[Recipe], out: torch.Tensor, axis: int = 0, start: int | None = None, _: Any = None, pace: int = 1
) -> list[Recipe]:
    axis, size = axis % out.dim(), _shape(inputs[0])[axis]
    if pace != 1:
        raise UnknownMoveError(f"slice of every {pace}th")
    start = min(max((start or 0) + (size if (start or 0) < 0 else 0), 0), size)
    return [_slice(inputs[0], axis, start, start + out.shape[axis])]


def _selected(inputs: list[Recipe], out: torch.Tensor, axis: int, index: int) -> list[Recipe]:
    whole = _shape(inputs[0])
    axis, index = axis % len(whole), index % whole[axis]
    return [_reshape(_slice(inputs[0], axis, index, index + 1), out.shape)]


def _split(inputs: list[Recipe], out: Sequence[torch.Tensor], _: Any, axis: int = 0) -> list[Recipe]:
    axis, at = axis % len(_shape(inputs[0])), 0
    parts = []
    for part in out:
        parts.append(_slice(inputs[0], axis, at, at + part.shape[axis]))
        at += part.shape[axis]
    return parts


def _unbound(inputs: list[Recipe], out: Sequence[torch.Tensor], axis: int = 0) -> list[Recipe]:
    axis = axis % len(_shape(inputs[0]))
    return [_reshape(_slice(inputs[0], axis, i, i + 1), part.shape) for i, part in enumerate(out)]


def _joined(inputs: list[Recipe], out: torch.Tensor, axis: int = 0) -> list[Recipe]:
    """Parts of several dtypes take that of the result, as torch promotes them."""
    parts = [cast(r, _NAMES[out.dtype]) for r in inputs]
    return [parts[0] if len(parts) == 1 else step("concat", *parts, axis=axis % out.dim())]


def _stacked(inputs: list[Recipe], out: torch.Tensor, axis: int = 0) -> list[Recipe]:
    axis = axis % out.dim()
    shape = [*out.shape[:axis], 1, *out.shape[axis + 1 :]]
    return _joined([_reshape(r, shape) for r in inputs], out, axis)


_ATEN = torch.ops.aten
MOVES: dict[Any, Move] = {
    **dict.fromkeys((_ATEN.clone.default, _ATEN.detach.default, _ATEN.alias.default, _ATEN.lift_fresh.default), _same),
    **dict.fromkeys(
        (
            _ATEN.view.default,
            _ATEN._unsafe_view.default,
            _ATEN._reshape_alias.default,
            _ATEN.unsqueeze.default,
            _ATEN.squeeze.default,
            _ATEN.squeeze.dim,
            _ATEN.squeeze.dims,
        ),
        _view,
    ),
    _ATEN._to_copy.default: _cast,
    _ATEN.transpose.int: _transpose,
    _ATEN.t.default: _transpose,
    _ATEN.permute.default: _permuted,
    _ATEN.slice.Tensor: _sliced,
    _ATEN.select.int: _selected,
    _ATEN.split.Tensor: _split,
    _ATEN.split_with_sizes.default: _split,
    _ATEN.unbind.int: _unbound,
    _ATEN.cat.default: _joined,
    _ATEN.stack.default: _stacked,
}
