"""A parameter that is read when code uses it: in go its recipe and a reader, out comes a tensor to compute with.

transformers' experts take `weight[expert]` one after the other; so a layer of hundreds of experts can run while the
values of one are in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from planc.compiler.ir.parts import part
from planc.compiler.ir.recipe import Recipe, infer, step

Read = Callable[[Recipe], torch.Tensor]


class LazyTensor(torch.Tensor):
    """Indexed with a number it loads that row; whatever else is asked of its values loads all of them, each time."""

    recipe: Recipe
    read: Read

    @classmethod
    def of(cls, recipe: Recipe, dtype: torch.dtype, read: Read) -> LazyTensor:
        """What `read(recipe)` returns, a tensor of `dtype`, once it is used."""
        made = torch.empty(_shape(recipe), dtype=dtype, device="meta").as_subclass(cls)
        made.recipe, made.read = recipe, read
        return made

    def whole(self) -> torch.Tensor:
        """The values, loaded."""
        return self.read(self.recipe)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            return super().__torch_function__(func, types, args, kwargs)
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return torch.device("cpu")
        if func in (torch.Tensor.view, torch.Tensor.reshape) and all(type(d) is int for d in args[1:]):
            shape = torch.empty(args[0].shape, device="meta").view(*args[1:]).shape
            return cls.of(step("reshape", args[0].recipe, shape=tuple(shape)), args[0].dtype, args[0].read)
        if func is torch.Tensor.__getitem__ and isinstance(args[0], cls) and (at := _number(args[1])) is not None:
            index = at % args[0].shape[0]
            return args[0].read(part(args[0].recipe, 0, index, index + 1))[0]
        args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs))
        return func(*args, **kwargs)


_ABOUT = {
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_meta.__get__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dim,
    torch.Tensor.size,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
}


def _shape(recipe: Recipe) -> tuple[int, ...]:
    return tuple(int(d) for d in infer(recipe).shape)


def _number(index: Any) -> int | None:
    """The row that an index names, if it is a whole number."""
    if isinstance(index, torch.Tensor) and index.dim() == 0 and not index.is_floating_point():
        return int(index) if index.dtype is not torch.bool else None
    return index if isinstance(index, int) and not isinstance(index, bool) else None
