"""Cases of ops along an axis: reductions, order, choice, sums that run; any axis of features, kept or dropped."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.compiler.lift.cases.common import FEW, A, Case, Cases, each, heads, order, places, still, truth, whole, wide

_ALONG: list[Case] = [
    lambda f, m, x, p: f(x, -1),
    lambda f, m, x, p: f(heads(x), 2),
    lambda f, m, x, p: f(wide(x), 3),
    lambda f, m, x, p: f(wide(x).transpose(2, 3), 2),
    lambda f, m, x, p: still(x, f(m.h, 0)),
    lambda f, m, x, p: f(x[..., :1], -1),
    lambda f, m, x, p: f(heads(x).transpose(1, 2), 1).transpose(1, 2),
]
_SOFT: list[Case] = [*_ALONG, lambda f, m, x, p: f(x.masked_fill(truth(m.v), -float("inf")), 2)]
_LOW_LEVEL: list[Case] = [*each(lambda case, f, m, x, p: case(lambda a, dim: f(a, dim, False), m, x, p), *_SOFT)]
_REDUCED: list[Case] = [
    lambda f, m, x, p: f(x, [-1], True) * x,
    lambda f, m, x, p: f(x, [2]),
    lambda f, m, x, p: f(heads(x), [2]),
    lambda f, m, x, p: f(heads(x), [-1, 2], keepdim=True).flatten(2),
    lambda f, m, x, p: f(heads(x), [2, 3]),
    lambda f, m, x, p: f(wide(x), [3]),
    lambda f, m, x, p: f(wide(x), [2], True).flatten(2),
    lambda f, m, x, p: f(x, [0])[None],
    lambda f, m, x, p: still(x, f(m.h, [0])),
    lambda f, m, x, p: x * f(m.h, [0, 1]),
    lambda f, m, x, p: f(torch.full((1, 1, 5), 1.5, device=x.device), [2]) + x[..., 0],
]
_WHOLE: list[Case] = [lambda f, m, x, p: f(whole(x), [-1]), lambda f, m, x, p: f(whole(wide(x)), [3], True).flatten(2)]
_ONE_AXIS: list[Case] = [
    lambda f, m, x, p: f(x * 0.7, -1),
    lambda f, m, x, p: f(heads(x), 2, True).flatten(2),
    lambda f, m, x, p: f(wide(x), 3),
    lambda f, m, x, p: f(whole(heads(x)), -1),
    lambda f, m, x, p: f(x, 0)[None],
]
_TRUE: list[Case] = [
    lambda f, m, x, p: f(truth(heads(x)), -1),
    lambda f, m, x, p: f(truth(heads(x)), 2, True).flatten(2),
    lambda f, m, x, p: f(truth(wide(x)), 3),
    lambda f, m, x, p: f(truth(heads(x) + 1), 3),
]
_SPREAD: list[Case] = [
    lambda f, m, x, p: f(x, [-1], keepdim=True) * x,
    lambda f, m, x, p: f(heads(x), [2]),
    lambda f, m, x, p: f(heads(x), [2, -1]),
    lambda f, m, x, p: still(x, f(m.h, [1])),
    lambda f, m, x, p: x * f(m.h, None),
    lambda f, m, x, p: f(torch.cat([wide(x), heads(x)], -1), [3]),
]
_CORRECTED: list[Case] = [
    *_SPREAD,
    *each(lambda n, f, m, x, p: f(heads(x), [3], correction=n), 0, 1, 2, None),
    lambda f, m, x, p: x * f(m.h, correction=0),
]
_UNBIASED: list[Case] = [
    *_SPREAD,
    lambda f, m, x, p: f(x, [2], False),
    lambda f, m, x, p: f(x, [2], unbiased=True, keepdim=True),
]
_BEST: list[Case] = [
    lambda f, m, x, p: tuple(f(x, dim=-1)),
    lambda f, m, x, p: tuple(f(heads(x), dim=2)),
    lambda f, m, x, p: tuple(f(heads(x), dim=-1, descending=True)),
    lambda f, m, x, p: f(whole(x), dim=2)[0],
    lambda f, m, x, p: f(wide(x), dim=3)[0],
]
_STABLE: list[Case] = [
    lambda f, m, x, p: tuple(f(whole(x), stable=True)),
    lambda f, m, x, p: tuple(f(whole(x), stable=True, descending=True, dim=-1)),
]


def _extremes(f: Any, m: nn.Module, x: Tensor, p: Tensor) -> Any:
    outs = [*f(x, -1), *f(heads(x), 2), *f(x[..., :1], 2), *f(order(x), 2)]
    return (*outs, *(o.flatten(2) for o in f(heads(x), 3, True)), f(wide(x), 3)[0], f(truth(x), 2)[0])


def _into_constant(f: Any, m: nn.Module, x: Tensor, p: Tensor) -> Any:
    """Weights of chosen experts dealt out over all of them."""
    best, ids = x[..., :8].topk(3, -1)
    return f(torch.zeros_like(x[..., :8]), 2, ids, best), f(x.new_zeros(1, x.shape[1], 8), -1, ids, best)


_SCATTER: list[Case] = [
    _into_constant,
    lambda f, m, x, p: f(x, -1, order(x), x * 2),
    lambda f, m, x, p: f(x, 2, order(x)[..., :5], x[..., :5] * 2),
    lambda f, m, x, p: f(heads(x), 2, order(heads(x).transpose(2, 3)).transpose(2, 3), heads(x) * 2),
    lambda f, m, x, p: f(whole(x), 2, order(x), places(x, 5)),
    lambda f, m, x, p: f(x, 2, m.places[:2].relu().expand(1, x.shape[1], 2), x[..., :2] * 3),
    lambda f, m, x, p: f(torch.ones(1, 1, 24, device=x.device).expand(1, x.shape[1], 24), 2, order(x), x),
    lambda f, m, x, p: f(m.v.expand(1, x.shape[1], 24), 2, order(x)[..., :2], x[..., :2]),
    lambda f, m, x, p: f(wide(x), 3, order(heads(x))[..., :2], heads(x)[..., :2]),
    lambda f, m, x, p: f(wide(x), 3, order(x[..., :6])[:, :, None, :2].expand(1, -1, 4, 2), heads(x)[..., :2]),
]
_ADDED: list[Case] = [
    *_SCATTER,
    lambda f, m, x, p: f(x, 2, places(x, 24), x * 2),
    lambda f, m, x, p: f(torch.zeros_like(x), -1, places(x, 24), torch.ones_like(x)),
]


def _reducing(name: str, cases: list[Case]) -> list[Case]:
    return each(lambda case, f, m, x, p: case(lambda *args: f(*args, reduce=name), m, x, p), *cases)


CASES: Cases = {
    A.softmax.int: [*_SOFT, lambda f, m, x, p: f(whole(x), 2, torch.float32)],
    A._softmax.default: _LOW_LEVEL[:FEW],
    A.log_softmax.int: [*_SOFT, lambda f, m, x, p: f(whole(x), 2, torch.float32)],
    A._log_softmax.default: _LOW_LEVEL[:FEW],
    A.cumsum.default: [
        *_ALONG,
        lambda f, m, x, p: f(whole(x), -1),
        lambda f, m, x, p: f(truth(x), 2),
        lambda f, m, x, p: f(whole(x), 2, dtype=torch.float32),
    ],
    A.mean.dim: [*_REDUCED, lambda f, m, x, p: f(whole(x), [2], dtype=torch.float32)],
    A.sum.dim_IntList: [*_REDUCED, *_WHOLE, lambda f, m, x, p: f(truth(x), [2])],
    A.sum.default: [lambda f, m, x, p: x * f(m.h), lambda f, m, x, p: x * f(m.number)],
    A.amax.default: [*_REDUCED, *_WHOLE, lambda f, m, x, p: x * f(m.h), lambda f, m, x, p: x * f(m.h, [], True)],
    A.amin.default: [*_REDUCED[:FEW], *_WHOLE, lambda f, m, x, p: x * f(m.h)],
    A.prod.dim_int: _ONE_AXIS,
    A.any.dim: _TRUE,
    A.all.dim: _TRUE,
    A.var.correction: _CORRECTED,
    A.std.correction: _CORRECTED[:FEW],
    A.var.dim: _UNBIASED[-FEW:],
    A.std.dim: _UNBIASED[-2:],
    A.linalg_vector_norm.default: [
        *each(lambda n, f, m, x, p: f(heads(x), n, [2], True).flatten(2), 1, 2, float("inf")),
        lambda f, m, x, p: f(x, dim=[-1]),
        lambda f, m, x, p: f(wide(x), 2, [3]),
        lambda f, m, x, p: f(heads(x), 2, [2, 3], dtype=torch.float32),
        lambda f, m, x, p: x * f(m.h),
    ],
    A.norm.ScalarOpt_dim: [
        *each(lambda n, f, m, x, p: f(heads(x), n, [-1]), 1, 2, None, float("inf")),
        lambda f, m, x, p: f(x, 2, [2], True),
    ],
    A.max.dim: [_extremes],
    A.min.dim: [_extremes],
    A.argmax.default: [
        lambda f, m, x, p: f(x, -1),
        lambda f, m, x, p: f(heads(x), 2, True).flatten(2),
        lambda f, m, x, p: f(wide(x), 3),
        lambda f, m, x, p: f(order(x), 2),
        lambda f, m, x, p: x * f(m.v),
    ],
    A.topk.default: [
        lambda f, m, x, p: tuple(f(x, 3)),
        lambda f, m, x, p: tuple(f(x, 2, -1, False)),
        lambda f, m, x, p: tuple(f(heads(x), 3, 2)),
        lambda f, m, x, p: f(whole(x), 4)[0],
        lambda f, m, x, p: f(x, 5, sorted=False)[0].sort(-1)[0],
        lambda f, m, x, p: tuple(f(m.h, 2, 1)[0] * x[..., i : i + 1, None] for i in (0, 1)),
    ],
    A.sort.default: _BEST,
    A.sort.stable: _STABLE,
    A.argsort.default: [lambda f, m, x, p: f(x), lambda f, m, x, p: f(heads(x), 2, True)],
    A.gather.default: [
        lambda f, m, x, p: f(x, -1, places(x, 24)),
        lambda f, m, x, p: f(x, 2, places(x, 24)[..., :4]),
        lambda f, m, x, p: f(heads(x), 2, places(heads(x), 4)[:, :, :2]),
        lambda f, m, x, p: f(heads(x), -1, places(heads(x), 6)[:, :, :2]),
        lambda f, m, x, p: f(heads(x), 3, places(heads(x), 6)[:, :, :1, :3]),
        lambda f, m, x, p: f(m.v.expand(1, x.shape[1], 24), 2, places(x, 24)),
        lambda f, m, x, p: f(wide(x), 3, places(heads(x), 6)[..., :2]),
        lambda f, m, x, p: f(whole(x), 2, places(x, 24)),
        lambda f, m, x, p: f(truth(x), 2, places(x, 24)),
        lambda f, m, x, p: f(x, 2, m.places.relu().expand(1, x.shape[1], 4)),
        lambda f, m, x, p: f(heads(x), 3, places(x[..., :2], 6)[:, :, None].expand(1, -1, 4, 2)),
    ],
    A.scatter.src: _SCATTER,
    A.scatter.value: [
        lambda f, m, x, p: f(x, -1, places(x, 24)[..., :5], 2.5),
        lambda f, m, x, p: f(torch.zeros_like(x), 2, x.topk(3)[1], 1),
        lambda f, m, x, p: f(torch.zeros_like(x, dtype=torch.bool), 2, x.topk(3)[1], True),
        lambda f, m, x, p: f(whole(x), 2, x.topk(3)[1], -7),
        lambda f, m, x, p: f(x, 2, x.topk(3)[1], -float("inf")),
    ],
    A.scatter.reduce: _reducing("add", _ADDED[-2:]),
    A.scatter_add.default: _ADDED[-FEW:],
    A.scatter_reduce.two: _reducing("sum", _ADDED[-2:]),
    A.one_hot.default: [
        lambda f, m, x, p: f(places(x[..., :3], 7), 7),
        lambda f, m, x, p: f(places(x[..., 0], 5), 5),
    ],
}  # fmt: skip
