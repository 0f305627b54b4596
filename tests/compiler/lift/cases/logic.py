"""Cases of comparisons, truth values, choices, and activations that are made of them."""

import torch

from tests.compiler.lift.cases.common import FEW, A, Case, Cases, heads, still, truth, whole, wide

_COMPARE: list[Case] = [
    lambda f, m, x, p: f(x, m.v),
    lambda f, m, x, p: f(m.v, x),
    lambda f, m, x, p: f(whole(x), whole(x.square())),
    lambda f, m, x, p: f(whole(x), x),
    lambda f, m, x, p: f(whole(x), m.number),
    lambda f, m, x, p: f(truth(x), truth(-x)),
    lambda f, m, x, p: f(heads(x), m.h[:, :1]),
    lambda f, m, x, p: f(wide(x), heads(x)),
    lambda f, m, x, p: f(m.v, torch.zeros_like(x)),
    lambda f, m, x, p: f(torch.zeros_like(x), m.v),
    lambda f, m, x, p: f(x, x),
    lambda f, m, x, p: f(x * float("nan"), x),
    lambda f, m, x, p: f(p[..., None], torch.arange(24, device=x.device)),
]
_COMPARE_NUMBER: list[Case] = [
    lambda f, m, x, p: f(x, 0.2),
    lambda f, m, x, p: f(x, 1),
    lambda f, m, x, p: f(whole(x), 1),
    lambda f, m, x, p: f(whole(x), 0.5),
    lambda f, m, x, p: f(truth(x), 1),
    lambda f, m, x, p: f(x, float("inf")),
    lambda f, m, x, p: f(x.abs().log(), -float("inf")),
    lambda f, m, x, p: f(torch.full_like(x, 2.0), 2) * x,
]
_BOTH: list[Case] = [
    lambda f, m, x, p: f(truth(x), truth(-x)),
    lambda f, m, x, p: f(truth(x), truth(m.v)),
    lambda f, m, x, p: f(truth(m.v), truth(x[..., :1])),
    lambda f, m, x, p: f(truth(x), torch.ones_like(x, dtype=torch.bool)),
    lambda f, m, x, p: f(torch.zeros_like(x, dtype=torch.bool), truth(x)),
    lambda f, m, x, p: f(truth(m.v), torch.zeros_like(x, dtype=torch.bool)),
    lambda f, m, x, p: f(truth(wide(x)), truth(heads(x))),
]
_NOT: list[Case] = [lambda f, m, x, p: f(truth(x)), lambda f, m, x, p: f(truth(wide(x)))]
_ACT: list[Case] = [lambda f, m, x, p: f(x * 5), lambda f, m, x, p: f(wide(x)), lambda f, m, x, p: still(x, f(m.v * 4))]
_ALIASES = {"greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne"}
_COMPARISONS = (*_ALIASES, *_ALIASES.values(), "eq")

CASES: Cases = {
    **{getattr(A, n).Tensor: _COMPARE[:FEW] for n in _COMPARISONS},
    **{getattr(A, n).Scalar: _COMPARE_NUMBER[:FEW] for n in _COMPARISONS},
    **{getattr(A, n).Tensor: _COMPARE for n in ("ge", "ne")},
    **{getattr(A, n).Scalar: _COMPARE_NUMBER for n in ("ge", "eq")},
    A.logical_not.default: [*_NOT, lambda f, m, x, p: f(whole(x)), lambda f, m, x, p: f(x.relu())],
    A.bitwise_not.default: _NOT,
    **{
        getattr(getattr(A, n), kind): _BOTH if kind == "default" else _BOTH[:2]
        for op in ("and", "or", "xor")
        for n, kind in ((f"logical_{op}", "default"), (f"bitwise_{op}", "Tensor"), (f"__{op}__", "Tensor"))
    },
    A.where.self: [
        lambda f, m, x, p: f(truth(x), x, m.v),
        lambda f, m, x, p: f(truth(x[..., :1]), m.v, x),
        lambda f, m, x, p: f(truth(m.h), heads(x), wide(x)),
        lambda f, m, x, p: f(truth(x), whole(x), x),
        lambda f, m, x, p: f(truth(x), whole(x), -whole(x) + 7),
        lambda f, m, x, p: f(truth(x), truth(-x), truth(m.v)),
        lambda f, m, x, p: f(x.abs() < 1e9, x, x.abs().log() * float("nan")),
        lambda f, m, x, p: f(truth(x), m.number, torch.full_like(x, -float("inf"))),
        lambda f, m, x, p: still(x, f(truth(m.h), m.h, m.h[:1])),
        lambda f, m, x, p: f(truth(heads(x).transpose(2, 3)), heads(x).transpose(2, 3), m.h.T),
    ],
    A.where.ScalarOther: [
        lambda f, m, x, p: f(truth(x), x, -float("inf")),
        lambda f, m, x, p: f(truth(x), whole(x), 0),
        lambda f, m, x, p: f(truth(x[..., :1]), m.v, 2.5),
    ],
    A.where.ScalarSelf: [lambda f, m, x, p: f(truth(x), 0.5, x), lambda f, m, x, p: f(truth(x), 1, whole(x))],
    A.where.Scalar: [lambda f, m, x, p: f(truth(x), 0.5, -2.0), lambda f, m, x, p: f(truth(x), 1, 0)],
    A.masked_fill.Scalar: [
        lambda f, m, x, p: f(x, truth(m.v), -float("inf")),
        lambda f, m, x, p: f(whole(x), truth(x), 4),
        lambda f, m, x, p: f(m.v, truth(x), torch.finfo(torch.float32).min),
        lambda f, m, x, p: f(truth(-x), truth(x), True),
        lambda f, m, x, p: f(wide(x), truth(heads(x)), 0.0),
        lambda f, m, x, p: f(heads(x), truth(x[..., :1, None]), 1.5),
    ],
    A.masked_fill.Tensor: [lambda f, m, x, p: f(x, truth(m.v), m.number)],
    A.leaky_relu.default: [*_ACT, lambda f, m, x, p: f(x, 0.3)],
    A.elu.default: [*_ACT, lambda f, m, x, p: f(x, 0.5, 1.5, 0.7)],
    **{
        o: _ACT
        for o in (A.hardsigmoid.default, A.hardswish.default, A.mish.default, A.log_sigmoid.default, A.relu6.default)
    },
    A.softplus.default: [
        *_ACT,
        lambda f, m, x, p: f(x * 20),
        lambda f, m, x, p: f(x, 0.5),
        lambda f, m, x, p: f(x * 3, 2, 1.5),
    ],
    **{
        o: [
            lambda f, m, x, p: f(x, m.v, x.abs() + 1),
            lambda f, m, x, p: f(m.v, x, x.abs() + 1, value=0.3),
            lambda f, m, x, p: f(heads(x), m.h, wide(x).abs() + 1, value=2),
        ]
        for o in (A.addcmul.default, A.addcdiv.default)
    },
}  # fmt: skip
