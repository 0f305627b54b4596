"""rotary: every spelling of a rotation becomes one op, latent attention's among them; what is none stays as it is."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from planc.codegen.target import parse
from planc.compiler.coverage.small import small
from planc.compiler.ir.graph import Graph, Node
from planc.compiler.ir.verify import verify
from planc.compiler.lift import lift
from planc.compiler.trace import trace
from planc.passes import fold, pipeline, rotary
from planc.passes.options import Options
from tests.compiler.lift.capture import both as compared
from tests.compiler.lift.capture import recipes, result, run
from tests.models import random_model

OPTIONS = Options(parse("cpu:portable"), "f32", "f32", 256, 8, 64, 16)
TOKENS = 70
Body = Callable[[nn.Module, Tensor, Tensor], Tensor]


def _ops(graph: Graph, name: str) -> list[Node]:
    return [n for n in graph.nodes if n.op == name]


# ---- latent attention, whose rotated part of a key is one for all heads


@pytest.mark.parametrize(
    ("arch", "interleaved", "apart"),
    [
        ("deepseek_v2", True, False),  # complex products of neighbours
        ("deepseek_v3", True, True),  # neighbours dealt into halves, then rotated
        ("minicpm3", False, False),  # halves
    ],
)
def test_rotations_of_latent_attention(arch: str, interleaved: bool, apart: bool) -> None:
    config = small(arch)
    model = random_model(config)
    rows = [p.name for p in pipeline.PIPELINE].index("rotary") + 1
    graph, log = pipeline.run(lift(trace(config), recipes(model)), OPTIONS, pipeline=pipeline.PIPELINE[:rows])
    layers = config.num_hidden_layers
    assert (log[-1].matches, log[-1].expected) == (2 * layers, 2 * layers)
    assert not _ops(graph, "cos")
    assert [n.attr("interleaved") for n in _ops(graph, "rotary")] == [interleaved] * 2 * layers
    heads = [graph.types[n.inputs[0]].shape[1] for n in _ops(graph, "rotary")]
    assert sorted(heads) == [1] * layers + [config.num_attention_heads] * layers
    assert len([n for n in _ops(graph, "transpose") if n.attr("perm") == (0, 1, 3, 2)]) == 2 * layers * apart
    assert _error(graph, model) <= 5e-6


def _error(graph: Graph, model: nn.Module) -> float:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 300, (1, TOKENS), generator=generator)
    positions = torch.randperm(250, generator=generator)[:TOKENS].sort().values[None]
    rows = torch.tensor([TOKENS - 1, 0, 40])
    with torch.no_grad():
        out = model(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)
    theirs = out.logits[0, rows].numpy()
    return float(np.abs(run(graph, model.state_dict(), ids, positions, rows) - theirs).max() / np.abs(theirs).max())


# ---- spellings


def _tables(m: nn.Module, p: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [1, T, 1, 6]."""
    angle = (p[..., None].float() * m.freq)[:, :, None]
    return angle.cos(), angle.sin()


def _two(x: Tensor) -> Tensor:
    """Two heads, [1, T, 2, 12]."""
    return x.view(1, -1, 2, 12)


def _halves(m: nn.Module, x: Tensor, p: Tensor) -> Tensor:
    (cos, sin), (a, b) = _tables(m, p), _two(x).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).flatten(2).exp()


def _rotate_half(m: nn.Module, x: Tensor, p: Tensor) -> Tensor:
    (cos, sin), h = _tables(m, p), _two(x)
    turned = torch.cat([-h[..., 6:], h[..., :6]], -1)
    return (h * torch.cat([cos, cos], -1) + turned * torch.cat([sin, sin], -1)).flatten(2).exp()


def _neighbours(m: nn.Module, x: Tensor, p: Tensor) -> Tensor:
    (cos, sin), h = _tables(m, p), _two(x)
    a, b = h[..., ::2], h[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(2).exp()


def _as_complex(m: nn.Module, x: Tensor, p: Tensor) -> Tensor:
    turns = torch.polar(torch.ones_like(p[..., None] * m.freq), p[..., None] * m.freq)[:, :, None]
    return torch.view_as_real(torch.view_as_complex(x.view(1, -1, 2, 6, 2)) * turns).flatten(2).exp()


def _dealt_apart(m: nn.Module, x: Tensor, p: Tensor) -> Tensor:
    halves = _two(x).view(1, -1, 2, 6, 2).transpose(3, 4).reshape(1, -1, 2, 12)
    (cos, sin), (a, b) = _tables(m, p), halves.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).flatten(2).exp()


def _a_part(m: nn.Module, x: Tensor, p: Tensor) -> Tensor:
    (cos, sin), h = _tables(m, p), _two(x)
    a, b, rest = h[..., :3], h[..., 3:6], h[..., 6:]
    cos, sin = cos[..., :3], sin[..., :3]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).flatten(2).exp()


def _scaled(m: nn.Module, x: Tensor, p: Tensor) -> Tensor:
    (cos, sin), (a, b) = _tables(m, p), _two(x).chunk(2, -1)
    cos, sin = cos * 1.3, sin * 1.3
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).flatten(2).exp()


def _backwards(m: nn.Module, x: Tensor, p: Tensor) -> Tensor:
    (cos, sin), (a, b) = _tables(m, p), _two(x).chunk(2, -1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], -1).flatten(2).exp()


def _across_heads(m: nn.Module, x: Tensor, p: Tensor) -> Tensor:
    """Two heads that are each other's partner are one."""
    (cos, sin), (a, b) = _tables(m, p), x.view(1, -1, 2, 2, 6).unbind(2)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], 2).flatten(2).exp()


ROTATIONS: dict[str, tuple[Body, bool]] = {
    "halves": (_halves, False),
    "rotate half": (_rotate_half, False),
    "neighbours": (_neighbours, True),
    "complex": (_as_complex, True),
    "dealt apart": (_dealt_apart, False),  # what deals them stays before it
    "a part": (_a_part, False),
    "scaled": (_scaled, False),
    "backwards": (_backwards, False),
    "across heads": (_across_heads, False),
}


def _passed(body: Body) -> tuple[Graph, int]:
    """The graph of a body after the pass, which must compute what torch does."""
    graph, ours, theirs = compared(body)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    graph, _ = fold.fold(graph, OPTIONS)
    graph, count = rotary.rotary(graph, OPTIONS)
    verify(graph, "rotary")
    np.testing.assert_allclose(result(graph), theirs, rtol=1e-5, atol=1e-5)
    return graph, count


@pytest.mark.parametrize("name", ROTATIONS)
def test_a_rotation_becomes_one_op(name: str) -> None:
    body, interleaved = ROTATIONS[name]
    graph, count = _passed(body)
    (node,) = _ops(graph, "rotary")
    assert count == 1
    assert node.attr("interleaved") == interleaved
    assert graph.types[node.inputs[1]].shape[0] == OPTIONS.max_model_len
    assert not {"mul", "concat", "sub"} & {n.op for n in graph.nodes}


def _hyperbolic(m: nn.Module, x: Tensor, p: Tensor) -> Tensor:
    (cos, sin), (a, b) = _tables(m, p), _two(x).chunk(2, -1)
    return torch.cat([a * cos + b * sin, b * cos + a * sin], -1).flatten(2).exp()


def _three_each(m: nn.Module, x: Tensor, p: Tensor) -> Tensor:
    (cos, sin), (a, b) = _tables(m, p), _two(x).chunk(2, -1)
    return torch.cat([a * cos - b * sin + a.roll(1, -1) * cos, b * cos + a * sin], -1).flatten(2).exp()


def _scaled_by_position(m: nn.Module, x: Tensor, p: Tensor) -> Tensor:
    return (_two(x) * torch.cat([_tables(m, p)[0]] * 2, -1)).flatten(2).exp()


NOT_ROTATIONS: dict[str, Body] = {
    "hyperbolic": _hyperbolic,
    "three inputs": _three_each,
    "scaled by position": _scaled_by_position,
}


@pytest.mark.parametrize("name", NOT_ROTATIONS)
def test_what_is_no_rotation_stays(name: str) -> None:
    graph, count = _passed(NOT_ROTATIONS[name])
    assert count == 0
    assert not _ops(graph, "rotary")


def test_the_pipeline_goes_on_where_one_stays() -> None:
    graph, ours, theirs = compared(_hyperbolic)
    after, log = pipeline.run(graph, OPTIONS)
    (row,) = [r for r in log if r.name == "rotary"]
    assert (row.matches, row.expected) == (0, 1)
    assert _ops(after, "fused"), "what is left runs as a loop of its own"
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
