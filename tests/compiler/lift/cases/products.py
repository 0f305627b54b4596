"""Cases of products, norms and lookups: weights of every shape, a matrix for each head, two activations."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.compiler.lift.cases.common import A, Cases, heads, places, still, whole, wide


def _turned(x: Tensor) -> Tensor:
    """[1, 4, T, 6]."""
    return heads(x).transpose(1, 2)


def _flat(x: Tensor) -> Tensor:
    return x.view(-1, 24)


def _by_token(x: Tensor) -> Tensor:
    """[T, 4, 6]."""
    return x.view(-1, 4, 6)


def _norms(f: Any, m: nn.Module, x: Tensor, p: Tensor) -> Any:
    one = x[..., :1].expand(1, -1, 24)
    plain = [f(x, [24]), f(x, [24], m.v), f(heads(x), [6], m.h[0]), f(one, [24], m.v)]
    return (*plain, f(x, [24], None, eps=0.5), f(heads(x).transpose(2, 3), [4]), f(x, [24], torch.ones_like(m.v)))


def _last(f: Any, m: nn.Module, x: Tensor, p: Tensor) -> Any:
    """[1, T, 24] and the rows of one weight are the same for any op between."""
    return (
        f(_flat(x), m.wt)[None],
        f(_flat(x), m.w.T)[None],
        f(m.w, _flat(x).T).T[None],
        f(_flat(x)[:, :1], m.v[None])[None],
    )


CASES: Cases = {
    A.linear.default: [
        lambda f, m, x, p: f(x, m.w),
        lambda f, m, x, p: f(x, m.w, m.v10),
        lambda f, m, x, p: f(x, m.w, torch.ones_like(m.v10)),
        lambda f, m, x, p: f(heads(x), m.heads[0].T),
        lambda f, m, x, p: f(heads(x).transpose(2, 3), m.h.T),
        lambda f, m, x, p: f(wide(x), m.heads[1].T),
        lambda f, m, x, p: f(x, torch.ones_like(m.w)),
        lambda f, m, x, p: still(x, f(m.h, m.heads[0].T)),
        lambda f, m, x, p: f(x[:, :, None], m.w).squeeze(2),
    ],
    A.addmm.default: [
        lambda f, m, x, p: f(m.v10, _flat(x), m.wt)[None],
        lambda f, m, x, p: f(m.v10, _flat(x), m.w.T, beta=1, alpha=1)[None],
    ],
    A.mm.default: [_last],
    A.bmm.default: [
        lambda f, m, x, p: f(x, m.wt[None]),
        lambda f, m, x, p: f(_by_token(x), _by_token(x).transpose(1, 2))[None],
        lambda f, m, x, p: f(x.view(-1, 4, 6).transpose(0, 1), m.heads).transpose(0, 1)[None],
        lambda f, m, x, p: f(x.view(-1, 1, 24), _by_token(x).reshape(-1, 24, 1)).view(1, -1),
    ],
    A.matmul.default: [
        lambda f, m, x, p: f(x, m.wt),
        lambda f, m, x, p: f(x, m.w.T),
        lambda f, m, x, p: f(_turned(x), m.heads).transpose(1, 2),
        lambda f, m, x, p: f(_turned(x), m.heads[None]).transpose(1, 2),
        lambda f, m, x, p: f(heads(x)[:, :, :, None], m.heads).squeeze(3),
        lambda f, m, x, p: f(torch.stack([heads(x), -heads(x)], 3), m.heads),
        lambda f, m, x, p: f(wide(x)[:, :, :, None], m.heads).squeeze(3),
        lambda f, m, x, p: f(heads(x), heads(x).transpose(2, 3)),
        lambda f, m, x, p: f(heads(x).transpose(2, 3), heads(x)),
        lambda f, m, x, p: f(f(heads(x), heads(x).transpose(2, 3)).softmax(-1), heads(x)),
        lambda f, m, x, p: f(wide(x), heads(x).transpose(2, 3)),
        lambda f, m, x, p: f(m.h, heads(x).transpose(2, 3)),
        lambda f, m, x, p: f(x[..., :3, None], x[:, :, None, :4]),
        lambda f, m, x, p: f(m.w, x.transpose(1, 2)).transpose(1, 2),
        lambda f, m, x, p: f(m.freq[None, :, None], p[:, None].float()).transpose(1, 2),
        lambda f, m, x, p: still(x, f(m.h, m.heads[0])),
        lambda f, m, x, p: f(x, torch.ones_like(m.wt)),
        lambda f, m, x, p: f(x, m.v),
        lambda f, m, x, p: f(heads(x), m.h[0]),
        lambda f, m, x, p: f(m.h[:, 0], heads(x)),
        lambda f, m, x, p: x * f(m.v, m.v),
    ],
    A.baddbmm.default: [
        lambda f, m, x, p: f(heads(x)[0, :, :, :4], _by_token(x), _by_token(x).transpose(1, 2))[None],
        lambda f, m, x, p: f(
            m.h[:, :4], _by_token(x), _by_token(x).transpose(1, 2), beta=0.5, alpha=2
        )[None],
    ],
    A.layer_norm.default: [
        _norms,
        lambda f, m, x, p: f(x, [24], m.v, m.v, 0.1),
        lambda f, m, x, p: f(x, [24], None, m.v),
        lambda f, m, x, p: f(x, [24], m.v, torch.zeros_like(m.v), 1e-5, False),
    ],
    A.rms_norm.default: [_norms, lambda f, m, x, p: f(x * 1e-3, [24], m.v, 1e-2)],
    A.embedding.default: [
        lambda f, m, x, p: f(m.table, p),
        lambda f, m, x, p: f(m.table, p + 2, 5),
        lambda f, m, x, p: f(m.w.T, places(x[..., 0], 24)),
        lambda f, m, x, p: f(torch.ones_like(m.table), p) * x,
        lambda f, m, x, p: f(m.table, p[:, :, None]).squeeze(2),
    ],
    A.index.Tensor: [
        lambda f, m, x, p: f(m.table, [p]),
        lambda f, m, x, p: f(m.biases, [places(x[..., 0], 3)]),
        lambda f, m, x, p: f(x, [None, None, m.places]),
        lambda f, m, x, p: f(heads(x), [None, None, torch.arange(3, -1, -1, device=x.device)]),
        lambda f, m, x, p: f(m.h, [m.places[1:2]]).flatten() + x[..., :6],
        lambda f, m, x, p: f(m.heads, [places(x[..., 0], 4)]),
        lambda f, m, x, p: f(
            _flat(x), [torch.arange(x.shape[1], device=x.device)[:, None], places(_flat(x)[:, :2], 24)]
        )[None],
    ],
    A.index_select.default: [
        lambda f, m, x, p: f(x, 2, m.places[:2]),
        lambda f, m, x, p: f(m.table, 0, p[0])[None],
        lambda f, m, x, p: f(heads(x), -1, m.places[1:2]),
        lambda f, m, x, p: f(whole(x), -1, m.places[:2]),
    ],
}  # fmt: skip
