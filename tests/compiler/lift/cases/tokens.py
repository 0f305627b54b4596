"""Cases of our own ops, beside what they mean in torch, of values made from nothing, and of complex tensors."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.compiler.lift.cases.common import A, Cases, heads, places, still, whole

P = torch.ops.planc


def _attention(f: Any, m: nn.Module, x: Tensor, p: Tensor, slopes: bool = False) -> Tensor:
    """Four query heads of 3, two key heads, values of 2; a window of 5. `f` may be the mask's op or attention's."""
    q, k, v = (
        x[..., a : a + n].view(1, -1, h, n // h).transpose(1, 2) for a, h, n in ((0, 4, 12), (12, 2, 6), (18, 2, 4))
    )
    tokens = x.shape[1]
    if x.is_meta:
        mask = P.mask.default(tokens, tokens, "sliding", 5, x.device)
        bias = m.v[:4] if slopes else None
        return P.attention.default(q, k, v, mask, None, None, bias, 0.7, True, 0, 0.0, 0).flatten(2)
    far = torch.arange(tokens)[None] - torch.arange(tokens)[:, None]
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.7
    scores = scores + (m.v[:4, None, None] * far if slopes else 0)
    weights = scores.masked_fill((far > 0) | (far <= -5), -float("inf")).softmax(-1)
    return (weights @ v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2)


def _experts(ids: Any, bias: bool, across: bool) -> Any:
    """`ids` makes experts [T, k] of x [T, 24]."""

    def case(f: Any, m: nn.Module, x: Tensor, p: Tensor) -> Tensor:
        flat = x.view(-1, 24)
        chosen, w, b = ids(m, flat), m.across if across else m.experts, m.biases if bias else None
        if x.is_meta:
            return f(flat, chosen, w, b, across)[None]
        rows = w[chosen] if across else w[chosen].transpose(2, 3)
        made = torch.einsum("tk,tjkn->tjn", flat, rows)
        return (made if b is None else made + b[chosen])[None]

    return case


def _slots(f: Any, m: nn.Module, x: Tensor, p: Tensor) -> Tensor:
    """x [T, k, 24], another one for each slot."""
    flat = torch.stack([x[0], -x[0] * 2], 1)
    chosen = places(x[0, :, :2], 3)
    if x.is_meta:
        return f(flat, chosen, m.experts, None, False)[None]
    return torch.einsum("tjk,tjnk->tjn", flat, m.experts[chosen])[None]


def _weighted(f: Any, m: nn.Module, x: Tensor, p: Tensor) -> Tensor:
    y, w = heads(x)[0], x[0, :, 5:9]
    return (f(y, w) if x.is_meta else torch.einsum("tkn,tk->tn", y, w))[None]


def _weighted_alike(f: Any, m: nn.Module, x: Tensor, p: Tensor) -> Tensor:
    y, w = heads(x)[0], x[0, :, 5:6].expand(-1, 4)
    return (f(y, w) if x.is_meta else torch.einsum("tkn,tk->tn", y, w))[None]


def _by_position(f: Any, m: nn.Module, x: Tensor, p: Tensor) -> Tensor:
    return f(p, m.table) if x.is_meta else m.table[p]


_SIZED = ("zeros", "ones")
_LIKE = ("zeros_like", "ones_like")

CASES: Cases = {
    P.mask.default: [_attention],
    P.attention.default: [_attention, lambda f, m, x, p: _attention(f, m, x, p, slopes=True)],
    P.expert_linear.default: [
        _experts(lambda m, x: places(x[:, :2], 3), bias=False, across=False),
        _experts(lambda m, x: places(x[:, :2], 3), bias=True, across=True),
        _experts(lambda m, x: places(x[:, :1], 3), bias=True, across=False),
        _experts(lambda m, x: torch.arange(3, device=x.device).expand(x.shape[0], 3), bias=False, across=False),
        _experts(lambda m, x: places(x[:, :1], 3).expand(-1, 2), bias=False, across=True),
        _slots,
    ],
    P.weighted_sum.default: [_weighted, _weighted_alike],
    P.by_position.default: [_by_position],
    A.full.default: [
        lambda f, m, x, p: x * f([1, x.shape[1], 24], 2.5, device=x.device),
        lambda f, m, x, p: whole(x) * f([24], 3, device=x.device),
        lambda f, m, x, p: x.masked_fill(f([24], True, device=x.device), 1.0),
        lambda f, m, x, p: x + f([], 1.5, dtype=torch.bfloat16, device=x.device).float(),
    ],
    A.full_like.default: [
        lambda f, m, x, p: x * f(x, 2.5),
        lambda f, m, x, p: f(x, 2.5, dtype=torch.int64) + whole(x),
        lambda f, m, x, p: f(x, -float("inf")),
    ],
    **{getattr(A, n).default: [
        lambda f, m, x, p: x + f([1, x.shape[1], 24], device=x.device),
        lambda f, m, x, p: whole(x) + f([24], dtype=torch.int64, device=x.device),
        lambda f, m, x, p: (x > 0) | f([24], dtype=torch.bool, device=x.device),
    ] for n in _SIZED},
    **{getattr(A, n).default: [
        lambda f, m, x, p: x + f(x),
        lambda f, m, x, p: f(x, dtype=torch.int64) + whole(x),
        lambda f, m, x, p: (x > 0) & f(x, dtype=torch.bool),
    ] for n in _LIKE},
    **{o: [
        lambda f, m, x, p: x + f(x, [1, x.shape[1], 24]),
        lambda f, m, x, p: f(x, [24], dtype=torch.int64) + whole(x),
    ] for o in (A.new_zeros.default, A.new_ones.default)},
    A.new_full.default: [
        lambda f, m, x, p: x * f(x, [24], 2.5),
        lambda f, m, x, p: f(x, [24], 7, dtype=torch.int64) + whole(x),
    ],
    A.scalar_tensor.default: [
        lambda f, m, x, p: x * f(2.5, device=x.device),
        lambda f, m, x, p: whole(x) + f(3, dtype=torch.int64, device=x.device),
        lambda f, m, x, p: x.masked_fill(f(True, dtype=torch.bool, device=x.device), 3.0),
    ],
    A.empty.memory_format: [
        lambda f, m, x, p: torch.slice_scatter(f([1, x.shape[1], 24], device=x.device), x, 2),
    ],
    A.empty_like.default: [lambda f, m, x, p: torch.slice_scatter(f(x), x, 2)],
    A.new_empty.default: [lambda f, m, x, p: torch.slice_scatter(f(x, [1, x.shape[1], 24]), x, 2)],
    A.fill.Scalar: [lambda f, m, x, p: x * f(x, 2.5), lambda f, m, x, p: f(whole(x), 3) + whole(x)],
    A.arange.default: [
        lambda f, m, x, p: x + f(24, device=x.device),
        lambda f, m, x, p: still(x, f(5, dtype=torch.float32, device=x.device) * 0.5),
        lambda f, m, x, p: still(x, f(2.5, device=x.device)),
    ],
    A.arange.start: [
        lambda f, m, x, p: x + f(3, 27, device=x.device),
        lambda f, m, x, p: still(x, f(-2, 3, device=x.device)),
    ],
    A.arange.start_step: [
        lambda f, m, x, p: x + f(0, 48, 2, device=x.device),
        lambda f, m, x, p: still(x, f(5, 0, -2, device=x.device)),
        lambda f, m, x, p: still(x, f(0, 6, 2, dtype=torch.float32, device=x.device) / 6),
    ],
}  # fmt: skip
