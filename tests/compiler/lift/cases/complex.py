"""Cases of complex tensors, which are pairs of real ones here; the ops of the second table know them as complex."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.compiler.lift.cases.common import A, Case, Cases, heads


def _pairs(x: Tensor) -> Tensor:
    """[1, T, 4, 3] complex."""
    return torch.view_as_complex(heads(x).unflatten(-1, (3, 2)))


def _angles(m: nn.Module, p: Tensor) -> Tensor:
    """[1, T, 6]."""
    return p[..., None] * m.freq


def _real(z: Tensor) -> Tensor:
    return torch.view_as_real(z).flatten(2)


def _rotated(f: Any, m: nn.Module, x: Tensor, p: Tensor) -> Any:
    """Neighbours turned by the position's angles."""
    turns = torch.polar(torch.ones_like(_angles(m, p)), _angles(m, p))[:, :, None]
    pairs = torch.view_as_complex(x.view(1, -1, 2, 6, 2))
    return f(torch.view_as_real(pairs * turns)) if f is A.view_as_real.default else _real(f(pairs, turns))


CASES: Cases = {
    A.view_as_complex.default: [
        lambda f, m, x, p: _real(f(heads(x).unflatten(-1, (3, 2))) * m.turns[:3]),
        lambda f, m, x, p: _real(f(x.view(1, -1, 12, 2)).view(1, -1, 2, 6) * m.turns),
        lambda f, m, x, p: _real(f(x.view(1, -1, 12, 2)[:, :, :1].expand(1, -1, 12, 2))),
    ],
    A.polar.default: [
        lambda f, m, x, p: _real(f(torch.ones_like(_angles(m, p)), _angles(m, p))),
        lambda f, m, x, p: _real(f(x[..., :6].abs(), _angles(m, p))),
        lambda f, m, x, p: _real(f(m.freq, _angles(m, p))),
    ],
    A.complex.default: [
        lambda f, m, x, p: _real(f(x[..., :6], x[..., 6:12]) * m.turns),
        lambda f, m, x, p: _real(f(m.h, m.h[:1].expand(4, 6)) * torch.complex(heads(x), heads(x))),
    ],
}  # fmt: skip

_SUMS: list[Case] = [
    lambda f, m, x, p: _real(f(_pairs(x), _pairs(x) * m.turns[:3])),
    lambda f, m, x, p: _real(f(_pairs(x), heads(x)[..., :3])),
    lambda f, m, x, p: _real(f(heads(x)[..., :3], _pairs(x))),
    lambda f, m, x, p: _real(f(_pairs(x), 1.5)),
    lambda f, m, x, p: _real(f(m.turns[:3], _pairs(x))),
]

COMPLEX: Cases = {
    A.view_as_real.default: [
        lambda f, m, x, p: f(_pairs(x)).flatten(2),
        lambda f, m, x, p: f(_pairs(x).transpose(1, 2)).transpose(1, 2).flatten(2),
        lambda f, m, x, p: f(m.turns).flatten() + x[..., :12],
        lambda f, m, x, p: f((_pairs(x) * 2.0).unsqueeze(2)).flatten(2),
        lambda f, m, x, p: f(torch.cat([_pairs(x), _pairs(x)[..., :1]], -1)).flatten(2),
        lambda f, m, x, p: f(_pairs(x).sum(2)).flatten(2),
        lambda f, m, x, p: f(-_pairs(x) / 2.0).flatten(2),
        lambda f, m, x, p: f(m.turns.expand(1, x.shape[1], 6)).flatten(2) * x[..., :1],
        lambda f, m, x, p: f(torch.stack(_pairs(x).unbind(2)[::-1], -1)).flatten(2),
        lambda f, m, x, p: f(_pairs(x) + _pairs(x) * m.turns[:3]).flatten(2),
    ],
    A.real.default: [lambda f, m, x, p: f(_pairs(x) * m.turns[:3]), lambda f, m, x, p: f(m.turns) * x[..., :6]],
    A.imag.default: [lambda f, m, x, p: f(_pairs(x) * m.turns[:3]), lambda f, m, x, p: f(m.turns) * x[..., :6]],
    A.add.Tensor: _SUMS,
    A.sub.Tensor: _SUMS,
    A.div.Tensor: [
        lambda f, m, x, p: _real(f(_pairs(x), 3.0)),
        lambda f, m, x, p: _real(f(_pairs(x), heads(x)[..., :3].abs() + 1)),
    ],
    A.mul.Tensor: [
        _rotated,
        lambda f, m, x, p: _real(f(_pairs(x), heads(x)[..., :3])),
        lambda f, m, x, p: _real(f(heads(x)[..., :3], _pairs(x))),
        lambda f, m, x, p: _real(f(_pairs(x), m.number)),
        lambda f, m, x, p: _real(f(_pairs(x), _pairs(x))),
    ],
}  # fmt: skip
