"""Attention with every keyword (grouped heads, values of another size, sinks, softcap, each mask) against torch."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from planc.compiler import hooks
from planc.errors import PlancError
from tests.compiler.lift.capture import Body, both, lifted

SCALE, CAP = 0.7, 2.0


def _heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [1, 4, T, 3], k [1, 2, T, 3], v [1, 2, T, 2] from x [1, T, 24]."""
    q, k, v = (
        x[..., a : a + n].view(1, -1, h, n // h).transpose(1, 2) for a, h, n in ((0, 4, 12), (12, 2, 6), (18, 2, 4))
    )
    return q, k, v


def _seen(kind: str, size: int, tokens: int) -> Tensor:
    q, k = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    near = {"causal": q >= 0, "sliding": k > q - size, "chunked": k // max(size, 1) == q // max(size, 1)}[kind]
    return (k <= q) & near


def _body(kind: str, size: int, *, sinks: bool = True, window: int = 0) -> Body:
    def body(model: nn.Module, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = _heads(x)
        sink = model.v[:4] if sinks else None
        if x.is_meta:
            mask = torch.ops.planc.mask(x.shape[1], x.shape[1], kind, size, x.device)
            out = hooks.attend(model, q, k, v, mask, 0.0, SCALE, None, window or None, CAP, sinks=sink)[0]
            return out.reshape(1, -1, 8)
        scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * SCALE
        scores = (CAP * torch.tanh(scores / CAP)).masked_fill(~_seen(kind, size, x.shape[1]), float("-inf"))
        if sink is not None:
            scores = torch.cat([scores, sink.view(1, 4, 1, 1).expand(1, 4, x.shape[1], 1)], -1)
        p = scores.softmax(-1)[..., : x.shape[1]]
        return (p @ v.repeat_interleave(2, 1)).transpose(1, 2).reshape(1, -1, 8)

    return body


@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize(("kind", "size"), [("causal", 0), ("sliding", 5), ("chunked", 4)])
def test_attention_equals_torch(kind: str, size: int, sinks: bool) -> None:
    _, ours, theirs = both(_body(kind, size, sinks=sinks))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_views_and_casts_of_a_mask_leave_it_what_it_is() -> None:
    def body(model: nn.Module, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = _heads(x)
        tokens = x.shape[1]
        mask = torch.ops.planc.mask(tokens, tokens, "sliding", 5, x.device)
        mask = mask[:, :, :, :tokens].expand(1, 1, tokens, tokens).to(torch.float32).contiguous()
        return hooks.attend(model, q, k, v, mask)[0].reshape(1, -1, 8)

    (node,) = [n for n in lifted(body).nodes if n.op == "attention"]
    assert (node.attr("kind"), node.attr("window")) == ("sliding", 5)


def test_window_keyword_agrees_with_the_mask() -> None:
    (node,) = [n for n in lifted(_body("sliding", 5, window=5)).nodes if n.op == "attention"]
    assert (node.attr("kind"), node.attr("window"), node.attr("sinks")) == ("sliding", 5, True)
    for kind, size in (("sliding", 6), ("causal", 0), ("chunked", 5)):
        with pytest.raises(PlancError, match="keyword says a sliding window of 5"):
            lifted(_body(kind, size, window=5))


def test_a_position_bias_and_a_computed_mask_are_refused() -> None:
    def biased(model: nn.Module, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = _heads(x)
        mask = torch.ops.planc.mask(x.shape[1], x.shape[1], "causal", 0, x.device)
        out, _ = hooks.attend(model, q, k, v, mask, position_bias=model.h)
        return out.reshape(1, -1, 8)

    def computed(model: nn.Module, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = _heads(x)
        mask = torch.ops.planc.mask(x.shape[1], x.shape[1], "causal", 0, x.device) * 2
        return hooks.attend(model, q, k, v, mask)[0].reshape(1, -1, 8)

    with pytest.raises(PlancError, match="position bias"):
        lifted(biased)
    with pytest.raises(PlancError, match=r"computes with an attention mask|merges tokens"):
        lifted(computed)
