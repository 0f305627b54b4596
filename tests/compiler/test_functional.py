"""In-place ops become plain ones: what a rewritten program computes, and what is left to torch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from planc.compiler.functional import functionalize


def fresh(x: Tensor) -> Tensor:
    y = x * 2
    y.add_(1).mul_(x)
    return y + x


def slices(x: Tensor) -> Tensor:
    y = x.new_empty((3, 8))
    y[:, :5] = x
    y[:, 5:] = x[:, :3] * 2
    return y


def element(x: Tensor) -> Tensor:
    y = x.clone() + 0
    y[:, 1] = x[:, 0] * 7
    return y * 2


def nested(x: Tensor) -> Tensor:
    y = torch.zeros(2, 3, 5)
    y[1, :, 2:4] = x[:, :2]
    return y.sum(0)


def filled(x: Tensor) -> Tensor:
    y = x + 1
    y.masked_fill_(x > 0, -1.0)
    return y


def seen_through_a_view(x: Tensor) -> Tensor:
    y = x + 1
    view = y.view(15)
    y.mul_(2)
    return view + 1


def through_a_reshape(x: Tensor) -> Tensor:
    y = x + 1
    y.view(15).mul_(3)
    return y


def exported(fn: Callable[[Tensor], Tensor]) -> torch.export.ExportedProgram:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fn(x)

    return torch.export.export(Module(), (torch.ones(3, 5),), strict=False)


@pytest.mark.parametrize("fn", [fresh, slices, element, nested, filled])
def test_a_rewritten_program_computes_the_same(fn: Callable[[Tensor], Tensor]) -> None:
    program = exported(fn)
    assert functionalize(program)
    schemas = [n.target._schema for n in program.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    assert not any(s.is_mutable for s in schemas)
    x = torch.randn(3, 5)
    program.graph_module.recompile()
    (got,) = program.graph_module(x)
    assert torch.equal(got, fn(x))


@pytest.mark.parametrize("fn", [seen_through_a_view, through_a_reshape])
def test_what_a_view_sees_is_left_to_torch(fn: Callable[[Tensor], Tensor]) -> None:
    assert not functionalize(exported(fn))


def test_a_parameter_that_is_written_is_left_to_torch() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3, 5))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return x + self.count

    assert not functionalize(torch.export.export(Module(), (torch.ones(3, 5),), strict=False))
