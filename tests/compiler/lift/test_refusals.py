"""What the lift refuses, by op, module and source line: tokens that mix, arguments that would be lost, unknown ops."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planc.compiler.lift import lift, table
from planc.compiler.trace import capture
from planc.errors import PlancError
from tests.compiler.lift.capture import recipes
from tests.ops_page import EXAMPLE

F = torch.nn.functional
A = torch.ops.aten
WIDTH = 24
Body = Callable[[Tensor], Tensor]


class _Mixer(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


LINE = inspect.getsourcelines(_Mixer.forward)[1] + 1


class _Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, WIDTH))
        self.mixer = _Mixer(body)

    def forward(self, ids: Tensor) -> Tensor:
        return self.mixer(F.embedding(ids, self.table)) + 1.0


class _Step(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.model = _Model(body)

    def forward(self, ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        return self.model(ids)[:, logit_rows]


def refusal(body: Body, most: int | None = None) -> str:
    """The error of a body of hidden states [1, T, 24]; `most` bounds the tokens of the trace."""
    step = _Step(body).to("meta")
    with torch.no_grad():
        traced = capture("body", step, {}, tokens=9, most=most)
    with pytest.raises(PlancError) as e:
        lift(traced, recipes(step.model))
    return str(e.value)


def _ids(x: Tensor) -> Tensor:
    return x.to(torch.int64)


def _complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.view(1, -1, 12, 2))


def _real(z: Tensor) -> Tensor:
    return torch.view_as_real(z).flatten(2)


MIX = "so tokens would mix outside of attention"
WHERE = "so a row would depend on where in the step it lies"
MIXING: dict[str, tuple[Body, str, str]] = {
    "softmax": (lambda x: x.softmax(1), "softmax.int", MIX),
    "log_softmax": (lambda x: x.log_softmax(1), "log_softmax.int", MIX),
    "cumsum": (lambda x: x.cumsum(1), "cumsum", MIX),
    "mean": (lambda x: x - x.mean(1, keepdim=True), "mean.dim", MIX),
    "mean of all": (lambda x: x - x.mean([0, 1, 2], keepdim=True), "mean.dim", MIX),
    "sum": (lambda x: x - x.sum(1, keepdim=True), "sum.dim_IntList", MIX),
    "sum of all": (lambda x: x - x.sum(), "sum", MIX),
    "amax": (lambda x: x - x.amax(1, keepdim=True), "amax", MIX),
    "amin of all": (lambda x: x - x.amin(), "amin", MIX),
    "prod": (lambda x: x - x.prod(1, keepdim=True), "prod.dim_int", MIX),
    "any": (lambda x: x * (x > 0).any(1, keepdim=True), "any.dim", MIX),
    "all": (lambda x: x * (x > 0).all(1, keepdim=True), "all.dim", MIX),
    "var": (lambda x: x - x.var(1, keepdim=True), "var.dim", MIX),
    "std": (lambda x: x - x.std(1, keepdim=True), "std.dim", MIX),
    "norm": (lambda x: x / x.norm(dim=1, keepdim=True), "linalg_vector_norm", MIX),
    "max": (lambda x: x - x.max(1, keepdim=True)[0], "max.dim", MIX),
    "argmax": (lambda x: x - x.argmax(1, keepdim=True), "argmax", MIX),
    "argmax of all": (lambda x: x - x.argmax(), "argmax", "all axes"),
    "topk": (lambda x: x + x.topk(1, 1)[0], "topk", MIX),
    "sort": (lambda x: x.sort(1)[0], "sort", MIX),
    "argsort": (lambda x: x.argsort(1) * x, "argsort", MIX),
    "gather": (lambda x: x.gather(1, _ids(x)), "gather", MIX),
    "gather of the first": (lambda x: x.gather(2, _ids(x[0, :1, :, None].transpose(1, 2))), "slice.Tensor", WHERE),
    "scatter": (lambda x: x.scatter(1, _ids(x), x), "scatter.src", MIX),
    "scatter over tokens alone": (lambda x: x * x[..., 0].scatter(1, _ids(x[..., 1]), 1.0)[..., None], "scatter", MIX),
    "scatter_add": (lambda x: torch.zeros_like(x).scatter_add(1, _ids(x), x), "scatter_add", MIX),
    "the first": (lambda x: x - x[:, :1], "slice.Tensor", WHERE),
    "the last": (lambda x: x - x[:, -1:], "slice.Tensor", WHERE),
    "one of them": (lambda x: x - x[:, 0].unsqueeze(1), "select.int", WHERE),
    "one written": (lambda x: torch.select_scatter(x, x[..., 0], 1, 0), "select_scatter", "replaces one of the T axis"),
    "roll": (lambda x: x + x.roll(1, 1), "roll", MIX),
    "roll of all": (lambda x: x + x.roll(1), "roll", "tokens among them"),
    "flip": (lambda x: x + x.flip(1), "flip", "reverses the T axis"),
    "pad": (lambda x: F.pad(x, (0, 0, 1, 0)), "pad", "merges tokens|tokens would mix"),
    "pad and cut": (lambda x: F.pad(x, (0, 0, 1, -1)), "pad", MIX),
    "cat": (lambda x: torch.cat([x, x], 1), "cat", "joins along|tokens"),
    "conv1d": (
        lambda x: F.conv1d(x.transpose(1, 2), torch.ones(24, 1, 3, device=x.device), padding=1, groups=24).mT,
        "conv1d",
        "carries a state from token to token",
    ),
    "scores": (lambda x: (x @ x.transpose(1, 2)) @ x, "matmul", "multiplies tokens with tokens outside of attention"),
    "sums of tokens": (
        lambda x: x + (x.transpose(1, 2) @ x).sum(1, keepdim=True),
        "matmul",
        "sums over tokens outside of attention",
    ),
    "weights by token": (
        lambda x: torch.ones(1, x.shape[1], device=x.device) @ x,
        "matmul",
        "sums over tokens outside of attention",
    ),
    "tokens halved": (lambda x: x.view(1, -1, 12).view(1, -1, 24), "view", "merged in an order that nothing tells"),
    "tokens repeated and cut": (lambda x: x.repeat(1, 2, 1)[:, : x.shape[1]], "slice.Tensor", "merged with another"),
    "all elements repeated": (
        lambda x: x.repeat_interleave(2).view(1, -1, 24),
        "repeat_interleave",
        "all axes at once",
    ),
    "in reverse": (
        lambda x: x[:, torch.arange(x.shape[1] - 1, -1, -1, device=x.device)],
        "arange.start_step",
        "size of T - 1|nothing of where",
    ),
    "by other tokens' places": (lambda x: x[:, _ids(x[0, :, 0])], "index.Tensor", "expected the wanted rows"),
    "the count of tokens": (
        lambda x: x * torch.full((1,), x.shape[1], dtype=torch.float32, device=x.device),
        "full",
        "the number of tokens in the step",
    ),
}
LOST: dict[str, tuple[Body, str, str]] = {
    "alpha": (lambda x: torch.add(x, x, alpha=2), "add.Tensor", "argument alpha would be lost"),
    "rows kept": (
        lambda x: torch.scatter_reduce(x, 2, _ids(x), x, "sum", include_self=False),
        "scatter_reduce.two",
        "forgets what was there",
    ),
    "another reduction": (
        lambda x: torch.scatter_reduce(x, 2, _ids(x), x, "amax"),
        "scatter_reduce.two",
        "reduces by 'amax'",
    ),
    "order of a norm": (lambda x: x / x.norm(3, dim=-1, keepdim=True), "linalg_vector_norm", "a norm of order 3"),
    "dropout": (lambda x: F.dropout(x, 0.5, training=True), "dropout", "dropout is on"),
    "mode of pad": (lambda x: F.pad(x, (1, 1), mode="circular"), "cat|pad|copy|slice", ""),
    "scale of a sum": (
        lambda x: torch.addmm(x[0, :, :4], x[0], torch.ones(24, 4, device=x.device), alpha=2)[None],
        "addmm",
        "alpha would be lost|expected a vector",
    ),
    "part of an axis": (
        lambda x: x.view(1, -1, 4, 6).scatter(3, _ids(x[..., :6]).unsqueeze(2), 1.0).flatten(2),
        "scatter.value",
        "replaces elements of a part",
    ),
    "two axes": (lambda x: F.layer_norm(x.view(1, -1, 4, 6), (4, 6)).flatten(2), "layer_norm", "last axis alone"),
    "bits": (lambda x: _ids(x) & 3, "__and__.Scalar|bitwise_and.Scalar|bitwise_and.Tensor", ""),
    "decimals": (lambda x: torch.round(x, decimals=1), "round.decimals", r"closed set .*docs/ops\.md"),
    "an unknown op": (lambda x: torch.special.bessel_j0(x), "special_bessel_j0", r"closed set .*docs/ops\.md"),
    "the size of a complex": (lambda x: _complex(x).abs().repeat(1, 1, 2), "abs", "not known for complex tensors"),
    "the inverse of a complex": (lambda x: _real(_complex(x) / _complex(x)), "div.Tensor", "by a complex tensor"),
    "complex beside real": (
        lambda x: _real(torch.cat([_complex(x), torch.complex(x, x)[..., :1] * 0, x[..., :1]], -1)),
        "cat",
        "complex and real",
    ),
}


@pytest.mark.parametrize("name", [*MIXING, *(n for n in LOST if n not in ("mode of pad", "bits"))])
def test_refused_by_op_module_and_line(name: str) -> None:
    body, op, why = (MIXING | LOST)[name]
    place = rf"^aten\.{op}\S* in mixer \(\S*test_refusals\.py:{LINE}\): .*"
    message = refusal(body)
    assert re.search(place + f"({why})", message), message
    assert "run it with transformers" in message


def test_a_part_of_a_table_as_long_as_the_step_is_refused() -> None:
    message = refusal(lambda x: x + torch.ones(4096, 24, device=x.device)[: x.shape[1]], most=4095)
    assert re.search(r"aten\.slice.* in mixer .*: takes 0:T of an axis of 4096, as many as the step has", message)


@pytest.mark.parametrize("name", ["mode of pad", "bits"])
def test_refused_in_whatever_form_torch_traces_it(name: str) -> None:
    assert "in mixer" in refusal(LOST[name][0])


def test_the_page_of_ops_shows_a_refusal_as_it_is() -> None:
    message = refusal(LOST["an unknown op"][0])
    assert message.partition("): ")[2] == EXAMPLE.partition("): ")[2]


# What a rule may leave to the traced result's own shape and dtype, or what changes no number.
HARMLESS = {
    *("dtype", "device", "layout", "pin_memory", "memory_format", "non_blocking", "copy", "half_to_float"),
    *("size", "shape", "sizes", "start_dim", "end_dim", "dim", "other", "self", "output_size"),
    *("split_size", "split_sizes", "chunks", "indices"),
    *("padding_idx", "scale_grad_by_freq", "sparse", "sparse_grad", "cudnn_enable"),
    "p",  # of dropout, which is off
    "sorted",  # of topk: sorted is one of the orders that may be
    "stable",  # of sort, which is
    "layer",  # of attention: layers are numbered by order
}


def test_rules_imply_no_other_arguments() -> None:
    folder = Path(table.__file__).parent
    calls = re.findall(r"call\.implied\(([^)]*)\)", "".join(p.read_text() for p in folder.glob("*.py")))
    names = {name for call in calls for name in re.findall(r'"(\w+)"', call)}
    assert len(calls) > 10
    assert names <= HARMLESS
