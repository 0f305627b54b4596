"""What the cases share: in go hidden states, out come integers, truth values, heads and values without tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

A = torch.ops.aten
Out = Tensor | tuple[Tensor, ...]
# (op, parameters, hidden [1, T, 24], positions [1, T]) -> something of each token that the op has made
Case = Callable[[Any, nn.Module, Tensor, Tensor], Out]
Cases = dict[Any, list[Case]]
# Ops that share a rule: one of them goes through every form that the rule knows, the others through a few.
FEW = 4


def each(case: Any, *values: Any) -> list[Case]:
    """A case of (value, op, parameters, hidden, positions) with each of the values."""
    return [partial(case, value) for value in values]


def whole(x: Tensor) -> Tensor:
    """Integers between some -9 and 9."""
    return (x * 3).to(torch.int64)


def places(x: Tensor, count: int) -> Tensor:
    """Integers from 0 to count - 1."""
    return (x.abs() * 7).to(torch.int64).remainder(count)


def order(x: Tensor) -> Tensor:
    """Numbers 0 to N - 1 along the last axis, each once."""
    return x.argsort(-1)


def truth(x: Tensor) -> Tensor:
    return x > 0.2


def heads(x: Tensor) -> Tensor:
    """[1, T, 4, 6]."""
    return x.view(1, -1, 4, 6)


def still(x: Tensor, value: Tensor) -> Tensor:
    """A value without tokens beside each token."""
    return x[..., :1] * 0 + value.reshape(1, 1, -1)


def wide(x: Tensor) -> Tensor:
    """One feature of each token on an axis of 6 along which nothing is stored, [1, T, 4, 6]."""
    return heads(x)[..., :1].expand(1, -1, 4, 6)
