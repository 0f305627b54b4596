"""Attention found at its softmax: scale, mask and slopes as models write them, and what must be refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from planc.compiler.anchor import anchored
from planc.compiler.coverage.small import small
from planc.compiler.lift import lift
from planc.compiler.trace import capture, trace
from planc.compiler.traced import Traced
from planc.errors import PlancError
from tests.compiler.lift import capture as bodies
from tests.compiler.lift.capture import recipes, result, run
from tests.models import random_model

LIMIT = 128
MIN = torch.finfo(torch.float32).min
Found = tuple[float, str, int, list[float] | None]


def found(traced: Traced) -> list[Found]:
    """(scale, kind, window, slopes) of each attention op of a trace."""
    out = []
    for node in traced.graph.nodes:
        if node.target is torch.ops.planc.attention.default:
            mask, slopes = node.args[3], node.args[6]
            values = None if slopes is None else traced.buffers[slopes.name].value.tolist()
            out.append((round(float(node.args[7]), 6), mask.args[2], mask.args[3], values))
    return out


# ---- models


def _powers(heads: int, base: float, factor: float = 1.0) -> list[float]:
    return [factor * base ** (i + 1) for i in range(heads)]


ROOT = round(24**-0.5, 6)
PLAIN: Found = (ROOT, "causal", 0, None)
FALCON: dict[str, Any] = dict(num_hidden_layers=1, alibi=False, parallel_attn=True)
MODELS: list[tuple[str, dict[str, Any], list[Found]]] = [
    ("bloom", dict(n_layer=1), [(ROOT, "causal", 0, _powers(4, 2**-2))]),
    ("bloom", dict(n_layer=1, n_head=6), [(0.25, "causal", 0, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])]),
    ("mpt", dict(n_layers=1), [(ROOT, "causal", 0, _powers(4, 2**-2))]),
    (
        "mpt",
        dict(n_layers=1, attn_config=dict(softmax_scale=0.3, clip_qkv=0.5)),
        [(0.3, "causal", 0, _powers(4, 2**-2))],
    ),
    ("falcon", FALCON | dict(new_decoder_architecture=True, num_kv_heads=2), [PLAIN]),
    ("falcon", FALCON | dict(new_decoder_architecture=False, multi_query=True, parallel_attn=False), [PLAIN]),
    (
        "falcon",
        FALCON | dict(new_decoder_architecture=False, multi_query=False, num_kv_heads=4, alibi=True),
        [(ROOT, "causal", 0, _powers(4, 2**-2, 2 * 24**-0.5))],  # twice, as its eager code has it; a gate says so
    ),
    (
        "gpt_neo",
        dict(num_layers=2, attention_types=[[["global", "local"], 1]], window_size=7),
        [(1.0, "causal", 0, None), (1.0, "sliding", 7, None)],
    ),
    ("xglm", dict(num_layers=1), [(1.0, "causal", 0, None)]),
    ("openai-gpt", dict(n_layer=1), [PLAIN]),
    ("gpt_neox_japanese", dict(num_hidden_layers=1), [PLAIN]),
    ("ctrl", dict(n_layer=1), [PLAIN]),
]


SLOW = (0, 2, 5, 9, 10, 11)  # what the others show too


@pytest.mark.parametrize(
    ("arch", "fields", "expected"),
    [pytest.param(*row, id=f"{row[0]}-{i}", marks=[pytest.mark.slow] * (i in SLOW)) for i, row in enumerate(MODELS)],
)
def test_attention_of_models_behind_no_interface(arch: str, fields: dict[str, Any], expected: list[Found]) -> None:
    config = small(arch, **fields)
    traced = trace(config)
    assert [f[:3] for f in found(traced)] == [f[:3] for f in expected]
    for (*_, ours), (*_, theirs) in zip(found(traced), expected, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            np.testing.assert_allclose(ours, theirs, rtol=4e-3)  # falcon's are rounded to bf16
    model = random_model(config)
    graph = lift(traced, recipes(model))
    assert not traced.numbers_tokens
    ids = torch.randint(3, 300, (1, 70), generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([69, 0, 33, 7])
    with torch.no_grad():
        theirs = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, rows].numpy()
    ours = run(graph, model.state_dict(), ids, torch.arange(70)[None], rows)
    assert np.abs(ours - theirs).max() <= (1e-3 if expected[0][3] and arch == "falcon" else 1e-5) * np.abs(theirs).max()


# ---- spellings


def _heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [1, 4, T, 2]."""
    q, k, v = (x[..., i : i + 8].view(1, -1, 4, 2).transpose(1, 2) for i in (0, 8, 16))
    return q, k, v


def _near(x: Tensor, window: int = 0) -> Tensor:
    """What each query sees, [T, T]."""
    q, k = torch.arange(x.shape[1], device=x.device)[:, None], torch.arange(x.shape[1], device=x.device)[None]
    return (k <= q) & (k > q - window) if window else k <= q


def _distance(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1], device=x.device)
    return (at[None] - at[:, None]).float()


def _attend(x: Tensor, between: Callable[[Tensor], Tensor], after: Callable[..., Tensor] = torch.matmul) -> Tensor:
    q, k, v = _heads(x)
    out = after(between(q @ k.transpose(-1, -2)).softmax(-1), v)
    return out.transpose(1, 2).reshape(1, -1, 8)


def _by_bmm(m: nn.Module, x: Tensor, p: Tensor) -> Tensor:
    """Heads in place of the batch, the bias added by the product."""
    q, k, v = (t[0] for t in _heads(x))
    bias = torch.tril(torch.ones(x.shape[1], x.shape[1], device=x.device)).sub(1).mul(10000.0)
    scores = torch.baddbmm(bias.expand(4, *bias.shape), q, k.transpose(1, 2), beta=1.0, alpha=0.5)
    return torch.bmm(scores.softmax(-1), v).transpose(0, 1).reshape(1, -1, 8)


SPELLINGS: dict[str, tuple[bodies.Body, Found]] = {
    "masked_fill": (
        lambda m, x, p: _attend(x, lambda s: (s * 0.5).masked_fill(~_near(x), -float("inf"))),
        (0.5, "causal", 0, None),
    ),
    "divided, where": (
        lambda m, x, p: _attend(x, lambda s: torch.where(_near(x), s / 4.0, MIN)),
        (0.25, "causal", 0, None),
    ),
    "a window, added": (
        lambda m, x, p: _attend(x, lambda s: s + torch.where(_near(x, 5), 0.0, MIN)),
        (1.0, "sliding", 5, None),
    ),
    "by positions": (
        lambda m, x, p: _attend(x, lambda s: s.masked_fill(p[:, None, None] > p[:, None, :, None], MIN)),
        (1.0, "causal", 0, None),
    ),
    "slopes": (
        lambda m, x, p: _attend(
            x,
            lambda s: (
                (s + (torch.arange(4, device=x.device) + 1.0)[:, None, None] * _distance(x) * 0.25)
                .mul(0.5)
                .masked_fill(~_near(x), MIN)
            ),
        ),
        (0.5, "causal", 0, [0.125, 0.25, 0.375, 0.5]),
    ),
    "slopes by key": (
        lambda m, x, p: _attend(
            x,
            lambda s: (s + 0.25 * torch.arange(x.shape[1], device=x.device)).masked_fill(~_near(x, 9), MIN),
        ),
        (1.0, "sliding", 9, [0.25] * 4),
    ),
    "heads as batch": (_by_bmm, (0.5, "causal", 0, None)),
}


def _traced(body: bodies.Body) -> Traced:
    return replace(bodies.traced.__wrapped__(body), limit=LIMIT)  # afresh: anchoring changes the graph


@pytest.mark.parametrize("name", SPELLINGS)
def test_each_spelling_is_found_and_computes_what_it_did(name: str) -> None:
    body, expected = SPELLINGS[name]
    traced = anchored(_traced(body))
    (ours,) = found(traced)
    assert ours[:3] == expected[:3]
    np.testing.assert_allclose(ours[3] or [], expected[3] or [], rtol=1e-5)
    graph = lift(traced, recipes(traced.module))
    assert [n.op for n in graph.nodes].count("attention") == 1
    with torch.no_grad():
        theirs = bodies._Step(body)(*bodies._inputs())[0].numpy()
    np.testing.assert_allclose(result(graph), theirs, rtol=1e-5, atol=1e-5)


# ---- negative controls


def _causal(x: Tensor, s: Tensor) -> Tensor:
    return s.masked_fill(~_near(x), MIN)


def _dilated(x: Tensor) -> Tensor:
    return _near(x) & (_distance(x) % 2 == 0)


def _prefix(x: Tensor) -> Tensor:
    return _near(x) | (torch.arange(x.shape[1], device=x.device) < 3)


def _far_only(x: Tensor) -> Tensor:
    """Causal for the first tokens, a window of a hundred from there."""
    return _near(x) & ((_distance(x) > -100) | (torch.arange(x.shape[1], device=x.device) < 2))


def _by_head(x: Tensor) -> Tensor:
    return _near(x) & (_distance(x) > -(torch.arange(4, device=x.device) + 3)[:, None, None])


REFUSED: dict[str, tuple[bodies.Body, str]] = {
    "softcap": (
        lambda m, x, p: _attend(x, lambda s: _causal(x, 5.0 * torch.tanh(s / 5.0))),
        "more than a scale, a mask and a bias",
    ),
    "a high softcap": (
        lambda m, x, p: _attend(x, lambda s: _causal(x, 500.0 * torch.tanh(s / 500.0))),
        "more than a scale, a mask and a bias",
    ),
    "relu of scores": (
        lambda m, x, p: _attend(x, lambda s: _causal(x, s.relu())),
        "more than a scale|different keys|neither causal",
    ),
    "a dilated mask": (
        lambda m, x, p: _attend(x, lambda s: s.masked_fill(~_dilated(x), MIN)),
        "neither causal nor a sliding window",
    ),
    "a prefix that all see": (
        lambda m, x, p: _attend(x, lambda s: s.masked_fill(~_prefix(x), MIN)),
        "neither causal nor a sliding window",
    ),
    "a mask that changes further on": (
        lambda m, x, p: _attend(x, lambda s: s.masked_fill(~_far_only(x), MIN)),
        "neither causal nor a sliding window",
    ),
    "no mask": (lambda m, x, p: _attend(x, lambda s: s * 0.5), "neither causal nor a sliding window"),
    "a mask for each head": (
        lambda m, x, p: _attend(x, lambda s: s.masked_fill(~_by_head(x), MIN)),
        "the heads of one layer see different keys",
    ),
    "a parameter": (
        lambda m, x, p: _attend(x, lambda s: _causal(x, s + m.v[:4, None, None] * _distance(x))),
        "scores depend on v besides queries and keys",
    ),
    "hidden states": (
        lambda m, x, p: _attend(x, lambda s: _causal(x, s * x[..., :1, None].transpose(1, 2))),
        "scores depend on table besides queries and keys",
    ),
    "a bias that is not linear": (
        lambda m, x, p: _attend(x, lambda s: _causal(x, s - _distance(x).abs().sqrt())),
        "not linear in the distance",
    ),
    "a bias that ends": (
        lambda m, x, p: _attend(x, lambda s: _causal(x, s + _distance(x).clamp(min=-40))),
        "not linear in the distance",
    ),
    "weights read twice": (
        lambda m, x, p: _attend(x, lambda s: _causal(x, s), lambda w, v: w @ v + w @ v.relu()),
        "the weights are read by 2 ops",
    ),
    "weights changed": (
        lambda m, x, p: _attend(x, lambda s: _causal(x, s), lambda w, v: w.square() @ v),
        r"aten\.(square|pow)\S* between the softmax and the product",
    ),
    "two products": (
        lambda m, x, p: _attend(x, lambda s: _causal(x, s + _heads(x)[2] @ _heads(x)[1].transpose(-1, -2))),
        "the scores come from 2 products",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_attention_of_ours_is_refused_with_its_finding(name: str) -> None:
    body, message = REFUSED[name]
    with pytest.raises(PlancError, match=message) as e:
        anchored(_traced(body))
    assert "capture.py:" in str(e.value)
    assert "run it with transformers" in str(e.value)


class _Padded(nn.Module):
    """Keys of one token, as padding would be, are hidden from all queries."""

    def __init__(self) -> None:
        super().__init__()
        self.model = bodies._Parts()

    def forward(self, ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        x = nn.functional.embedding(ids, self.model.table)
        pad = (ids == 1)[:, None, None]
        return _attend(x, lambda s: _causal(x, s).masked_fill(pad, MIN))[:, logit_rows]


def test_a_mask_by_token_is_refused() -> None:
    step = _Padded()
    buffers = {name: b.clone() for name, b in step.model.named_buffers()}
    with torch.no_grad():
        traced = capture("padded", step.to("meta"), buffers, tokens=9)
    with pytest.raises(PlancError, match="depends on the tokens themselves"):
        anchored(replace(traced, limit=LIMIT))
