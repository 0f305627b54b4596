"""Each spelling of each op, lifted alone and interpreted, against torch; and what the closed set refuses."""

from collections import Counter

import numpy as np
import pytest
import torch

from tests.compiler.lift.capture import Body, both, lifted, traced

F = torch.nn.functional

BODIES: dict[str, Body] = {
    # elementwise, in every spelling
    "scalars": lambda m, x, p: 2.0 - (x * 0.5 + 1.5) / 3.0,
    "scalar over tensor": lambda m, x, p: 2.0 / (x.abs() + 1.0),
    "alpha": lambda m, x, p: torch.add(x, x, alpha=1),
    "one over sqrt": lambda m, x, p: x * (1.0 / torch.sqrt(x.abs() + 1)) + torch.reciprocal(x.abs() + 3),
    "powers": lambda m, x, p: x**2 + x * x + x.abs() ** 0.5 + (x.abs() + 1) ** -0.5 + x**3 + 1.5**x + (x + 9) ** -1,
    "of a known number": lambda m, x, p: x * torch.special.gammaln(m.number) + m.number.long() // 2,
    "known number": lambda m, x, p: x * m.number + m.number,
    "broadcast parameters": lambda m, x, p: (x * m.v + m.v).view(1, -1, 4, 6).mul(m.h).add(m.h[:, :1]).flatten(2),
    "activations": lambda m, x, p: (
        F.gelu(x) + F.gelu(x, approximate="tanh") + F.silu(x) + F.relu(x).square() + torch.erf(x)
    ),
    "more activations": lambda m, x, p: F.softplus(x) + torch.sigmoid(x) + torch.tanh(x) + torch.exp(-x.abs()).log(),
    "clamp": lambda m, x, p: x.clamp(-0.5, 0.7) + x.clamp(min=0.1) + torch.maximum(x, m.v),
    "nothing": lambda m, x, p: F.dropout(x.contiguous().clone().detach() * 1.0 + 0, training=False).to(torch.float32),
    "in place": lambda m, x, p: x.clone().mul_(2.0).add_(1.0),
    # positions and constants
    "rotation": lambda m, x, p: torch.cat([(p[:, :, None].float() * m.freq).cos()] * 4, -1) * x,
    "outer product": lambda m, x, p: (
        (m.freq[None, :, None] @ p[:, None, :].float()).transpose(1, 2).repeat(1, 1, 4) + x
    ),
    "made constants": lambda m, x, p: (
        x + torch.full((1, 1, 24), 2.0, device=x.device) + torch.ones_like(x) + torch.arange(24, device=x.device)
    ),
    "bf16 constants": lambda m, x, p: (
        x * m.bf16.float() + torch.full((1,), 1.5, dtype=torch.bfloat16, device=x.device).float()
    ),
    "table by position": lambda m, x, p: x + m.table[p] + F.embedding(p + 2, m.table),
    # products, norms, reductions
    "linear": lambda m, x, p: F.linear(x, m.w, m.v10),
    "linear over heads": lambda m, x, p: F.linear(x.view(1, -1, 6, 4).transpose(2, 3), m.h).flatten(2),
    "addmm": lambda m, x, p: torch.addmm(m.v10, x.view(-1, 24), m.wt).view(1, -1, 10),
    "matmul": lambda m, x, p: x @ m.wt + x @ m.w.T,
    "layer norm": lambda m, x, p: F.layer_norm(x, (24,), m.v, m.v, 1e-3) + F.layer_norm(x, (24,)),
    "rms norm": lambda m, x, p: F.rms_norm(x, (24,), m.v, 1e-3) + F.rms_norm(x, (24,)),
    "reductions": lambda m, x, p: x - x.mean(-1, keepdim=True) + x.amax(-1)[..., None] * x.sum(-1).unsqueeze(-1),
    "inner reduction": lambda m, x, p: x.view(1, -1, 4, 6).sum(2) + x.view(1, -1, 4, 6).mean(2, keepdim=True)[:, :, 0],
    # moves
    "heads and back": lambda m, x, p: x.view(1, -1, 4, 6).transpose(1, 2).mul(2).transpose(1, 2).reshape(1, -1, 24),
    "features swapped": lambda m, x, p: x.view(1, -1, 4, 6).transpose(2, 3).reshape(1, -1, 24),
    "features swapped late": lambda m, x, p: (
        (x.view(1, -1, 4, 6).permute(0, 3, 1, 2) * 2).permute(0, 2, 3, 1).flatten(2) * x
    ),
    "movedim": lambda m, x, p: x.view(1, -1, 4, 6).movedim(2, 3).flatten(2),
    "pieces": lambda m, x, p: torch.cat([*x.chunk(3, -1)[::-1], *x.split(12, -1), *x.split([4, 20], -1)], -1),
    "rotate half": lambda m, x, p: torch.cat((-x[..., 12:], x[..., :12]), -1) * x,
    "interleaved": lambda m, x, p: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2),
    "repeated in place": lambda m, x, p: x[..., :12].repeat_interleave(2, -1) + x,
    "unbound": lambda m, x, p: torch.stack(x.view(1, -1, 4, 6).unbind(2)[::-1], 2).flatten(2),
    "one feature": lambda m, x, p: x * x[..., 5].square()[..., None] + x[..., 3:4].squeeze(-1).unsqueeze(-1),
    "select": lambda m, x, p: x.view(1, -1, 4, 6)[:, :, -1] * x.view(1, -1, 4, 6).select(2, 1),
    "repeated heads": lambda m, x, p: (
        x.view(1, -1, 4, 6)[:, :, :, None].expand(1, -1, 4, 2, 6)[:, :, :2].reshape(1, -1, 24)
    ),
    "views with gaps": lambda m, x, p: (
        x.view(1, -1, 4, 6)[..., :3].reshape(1, -1, 12) + x.view(1, -1, 4, 6)[..., 3:].flatten(2)
    ),
    "an empty rest": lambda m, x, p: torch.cat((x[..., :24] * 2, x[..., 24:]), -1),
    "squeezes": lambda m, x, p: x.squeeze(0).unsqueeze(1).squeeze(1)[None] + x.squeeze(),
    "flat tokens": lambda m, x, p: x.reshape(-1, 24).mul(m.v).view(1, -1, 24),
    "weights move": lambda m, x, p: x @ torch.cat([m.wt[:, 5:], m.wt[:, :5]], 1),
}


@pytest.mark.parametrize("name", BODIES)
def test_lifted_body_equals_torch(name: str) -> None:
    _, ours, theirs = both(BODIES[name])
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "one over sqrt": {"rsqrt": 1, "reciprocal": 1, "sqrt": 0, "div": 0},
        "powers": {"square": 2, "sqrt": 1, "rsqrt": 1, "reciprocal": 1, "pow": 2},
        "nothing": {"embedding": 1, "take_rows": 1, "cast": 0, "mul": 0, "add": 0},
        "heads and back": {"reshape": 2, "transpose": 0, "copy": 0},
        "squeezes": {"reshape": 0, "add": 1},
        "known number": {"mul": 1, "add": 1},
        "weights move": {"slice": 0, "concat": 0, "transpose": 0, "linear": 1},
        "matmul": {"linear": 2, "transpose": 0},
        "addmm": {"linear": 1, "add": 0, "reshape": 0},
    }.items(),
)
def test_spelling_is_normalised(name: str, expected: dict[str, int]) -> None:
    count = Counter(n.op for n in lifted(BODIES[name]).nodes)
    assert {op: count[op] for op in expected} == expected


# Tokens merged with another axis, [k T, ..], which is kept apart from theirs.
MERGED: dict[str, Body] = {
    "repeated whole": lambda m, x, p: (x[0].repeat(3, 1) * m.v).view(3, -1, 24).sum(0)[None],
    "repeated in place": lambda m, x, p: (x[0].repeat_interleave(3, 0) + m.v).view(-1, 3, 24).sum(1)[None],
    "through a layer": lambda m, x, p: F.linear(x[0].repeat(2, 1), m.w, m.v10).view(2, -1, 10).sum(0)[None],
    "heads beside tokens": lambda m, x, p: (x.view(1, -1, 4, 6).view(-1, 6) * 2).view(1, -1, 24),
    "heads before tokens": lambda m, x, p: (
        (x.view(-1, 4, 6).transpose(0, 1).reshape(-1, 6) * 2).view(4, -1, 6).transpose(0, 1).reshape(1, -1, 24)
    ),
    "each with its own": lambda m, x, p: (
        (x[0].repeat(2, 1).view(2, -1, 24) * torch.stack([x[0], -x[0]])).view(-1, 24).exp().view(2, -1, 24).sum(0)[None]
    ),
}


@pytest.mark.parametrize("name", MERGED)
def test_tokens_merged_with_another_axis(name: str) -> None:
    _, ours, theirs = both(MERGED[name])
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_model_that_numbers_its_tokens_gets_their_positions() -> None:
    """Where a token lies in a whole sequence is its position; the gate asks whether the model goes on counting."""

    def body(m: torch.nn.Module, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return x * (torch.arange(x.shape[1], device=x.device)[None, :, None] if x.is_meta else p[..., None])

    assert traced(body).numbers_tokens
    _, ours, theirs = both(body)
    np.testing.assert_allclose(ours, theirs)
    assert not traced(BODIES["rotation"]).numbers_tokens
