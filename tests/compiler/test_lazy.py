"""Lazy tensors: each kind of use gives what the values give, and an index reads one row."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from planc.compiler.ir.recipe import Recipe, infer, load
from planc.compiler.lazy import LazyTensor

VALUES = torch.randn((6, 4, 8), generator=torch.Generator().manual_seed(0))
X = torch.randn((3, 8), generator=torch.Generator().manual_seed(1))

USES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "number": (lambda w: w[2], 1),
    "from the end": (lambda w: w[-1], 1),
    "scalar tensor": (lambda w: w[torch.tensor(3)], 1),
    "view, then number": (lambda w: w.view(12, 2, 8)[5], 1),
    "reshape, then number": (lambda w: w.reshape(-1, 1, 4, 8)[5], 1),
    "range": (lambda w: w[1:3], 6),
    "index tensor": (lambda w: w[torch.tensor([1, 4])], 6),
    "mask": (lambda w: w[torch.tensor([True, False, True, False, True, True])], 6),
    "product": (lambda w: X @ w.transpose(1, 2), 6),
    "linear": (lambda w: torch.nn.functional.linear(X, w[0]), 1),
    "keyword": (lambda w: torch.nn.functional.linear(X, weight=w[4]), 1),
    "in a list": (lambda w: torch.cat([w, w]), 12),
    "shape": (lambda w: torch.zeros(w.shape, dtype=w.dtype, device=w.device) + w.dim(), 0),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_gives_what_the_values_give(use: str) -> None:
    read_rows: list[int] = []

    def read(recipe: Recipe) -> Tensor:
        read_rows.append(int(infer(recipe).nbytes()) // (4 * 8 * 4))
        return _made(recipe)

    work, rows = USES[use]
    lazy = LazyTensor.of(load("w", "f32", (6, 4, 8)), torch.float32, read)
    assert torch.equal(work(lazy), work(VALUES))
    assert not isinstance(work(lazy), LazyTensor)
    assert sum(read_rows) == 2 * rows or use.startswith("view")


def _made(recipe: Recipe) -> Tensor:
    if recipe.op == "load":
        return VALUES.clone()
    source = _made(recipe.inputs[0])
    if recipe.op == "slice":
        assert recipe.get("axis") == 0
        return source[recipe.get("start") : recipe.get("stop")]  # type: ignore[misc]
    assert recipe.op == "reshape"
    return source.reshape(recipe.get("shape"))  # type: ignore[arg-type]
