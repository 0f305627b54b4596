"""Cases of elementwise ops: floats, integers, truth values, numbers on either side, what broadcasts."""

from typing import Any

import torch

from tests.compiler.lift.cases.common import FEW, A, Case, Cases, each, heads, still, truth, whole, wide

_ONE: list[Case] = [
    lambda f, m, x, p: f(x),
    lambda f, m, x, p: f(whole(x)),
    lambda f, m, x, p: still(x, f(m.h)),
    lambda f, m, x, p: f(wide(x)),
]
_POSITIVE: list[Case] = [
    lambda f, m, x, p: f(x.abs() + 0.1),
    lambda f, m, x, p: f(p + 1),
    lambda f, m, x, p: f(m.freq * (p[..., None] + 1)),
]
_HALVES: list[Case] = [lambda f, m, x, p: f(whole(x) * 0.5), *_ONE]  # half to even, and both sides of zero
_TWO: list[Case] = [
    lambda f, m, x, p: f(x, x.square()),
    lambda f, m, x, p: f(x, m.v),
    lambda f, m, x, p: f(m.v, x),
    lambda f, m, x, p: f(whole(x), whole(x * x)),
    lambda f, m, x, p: f(whole(x), x),
    lambda f, m, x, p: f(heads(x), m.h[:, :1]),
    lambda f, m, x, p: f(x[..., :1], x),
    lambda f, m, x, p: f(wide(x), heads(x)),
    lambda f, m, x, p: f(x, torch.full_like(x, 1.5)),
    lambda f, m, x, p: f(torch.full((4, 1), 1.5, device=x.device), heads(x)),
    lambda f, m, x, p: f(m.v, torch.full_like(x, 1.5)) * x,
    lambda f, m, x, p: f(x, m.number),
    lambda f, m, x, p: f(m.number, x),
    lambda f, m, x, p: f(whole(x), m.number),
    lambda f, m, x, p: still(x, f(m.h, m.h[:1])),
]
_NUMBER: list[Case] = [
    lambda f, m, x, p: f(x, 2.5),
    lambda f, m, x, p: f(x, 3),
    lambda f, m, x, p: f(whole(x), 3),
    lambda f, m, x, p: f(whole(x), 2.5),
    lambda f, m, x, p: f(wide(x), -1.5),
]
_SCALED: list[Case] = [lambda f, m, x, p: f(x, m.v, alpha=1), *_TWO]
_SAFE_TWO: list[Case] = [
    lambda f, m, x, p: f(x, x.square() + 0.5),
    lambda f, m, x, p: f(m.v, x.abs() + 0.5),
    lambda f, m, x, p: f(heads(x), m.h[:, :1].abs() + 0.5),
    lambda f, m, x, p: f(whole(x), whole(x * x) + 2),
    lambda f, m, x, p: f(whole(x), -(p + 3)[..., None]),
    lambda f, m, x, p: f(x, m.number),
    lambda f, m, x, p: f(m.number, x.abs() + 0.5),
]


def _number(mode: str, f: Any, m: Any, x: Any, p: Any) -> Any:
    """With a rounding mode, of both signs."""
    return f(whole(x), 2, rounding_mode=mode), f(x, 0.7, rounding_mode=mode), f(whole(x), -4, rounding_mode=mode)


def _tensors(f: Any, m: Any, x: Any, p: Any) -> Any:
    modes = ("floor", "trunc", None)
    return tuple(f(a, b, rounding_mode=mode) for mode in modes for a, b in ((whole(x), whole(x * x) + 2), (x, m.v)))


CASES: Cases = {
    **{
        getattr(A, n).default: _ONE[:2]
        for n in ("exp", "square", "cos", "sin", "tanh", "erf", "sigmoid", "relu", "expm1", "sign")
    },
    **{getattr(A, n).default: _ONE for n in ("neg", "abs")},
    **{getattr(A, n).default: _ONE[:2] for n in ("absolute", "negative")},
    **{getattr(A, n).default: _HALVES[:FEW] for n in ("round", "floor", "ceil", "trunc")},
    **{getattr(A, n).default: _POSITIVE for n in ("log", "sqrt", "rsqrt", "log1p", "reciprocal")},
    A.silu.default: [_ONE[0], _ONE[2], _ONE[3]],
    A.gelu.default: [_ONE[0], lambda f, m, x, p: f(x, approximate="tanh"), _ONE[3]],
    A.clamp.default: [
        lambda f, m, x, p: f(x, -0.5, 0.7),
        lambda f, m, x, p: f(x, min=0.1),
        lambda f, m, x, p: f(x, None, 0.3),
        lambda f, m, x, p: f(whole(x), -2, 3),
        lambda f, m, x, p: f(x, 1.0, -1.0),  # the upper bound wins
        lambda f, m, x, p: f(x, -float("inf"), 0.5),
    ],
    **{o: _NUMBER for o in (A.clamp_min.default, A.clamp_max.default)},
    A.clip.default: [lambda f, m, x, p: f(x, -0.5, 0.7)],
    A.clamp.Tensor: [
        lambda f, m, x, p: f(x, m.v, x.square()),
        lambda f, m, x, p: f(x, max=m.v),
        lambda f, m, x, p: f(m.v, x),
        lambda f, m, x, p: f(x, whole(x) - 1, None),
    ],
    **{o: _TWO[:FEW] for o in (A.clamp_min.Tensor, A.clamp_max.Tensor)},
    A.hardtanh.default: [lambda f, m, x, p: f(x * 2), lambda f, m, x, p: f(x, -0.4, 0.3)],
    A.sub.Tensor: _SCALED,
    **{o: _SCALED[:FEW] for o in (A.add.Tensor, A.subtract.Tensor, A.rsub.Tensor)},
    **{
        o: [lambda f, m, x, p: f(x, 0), *_NUMBER]
        for o in (A.add.Scalar, A.sub.Scalar, A.subtract.Scalar, A.rsub.Scalar)
    },
    A.mul.Tensor: [lambda f, m, x, p: f(x, x), *_TWO],
    A.multiply.Tensor: _TWO[:FEW],
    **{o: [lambda f, m, x, p: f(x, 1), *_NUMBER] for o in (A.mul.Scalar, A.multiply.Scalar)},
    A.div.Tensor: _SAFE_TWO,
    A.divide.Tensor: _SAFE_TWO[:FEW],
    **{o: _NUMBER for o in (A.div.Scalar, A.divide.Scalar)},
    A.div.Tensor_mode: [_tensors],
    A.div.Scalar_mode: each(_number, "floor", "trunc"),
    **{o: _SAFE_TWO for o in (A.floor_divide.default, A.remainder.Tensor)},
    **{
        o: [*_NUMBER, lambda f, m, x, p: f(whole(x), -4)] for o in (A.floor_divide.Scalar, A.remainder.Scalar)
    },
    A.maximum.default: _TWO,
    **{o: _TWO[:FEW] for o in (A.max.other, A.min.other, A.minimum.default)},
    A.pow.Tensor_Scalar: [
        *each(lambda n, f, m, x, p: f(x.abs() + 0.5, n), 2, 3, 0.5, -0.5, -1, -2, 1, 0, 1.7),
        lambda f, m, x, p: f(whole(x), 2),
        lambda f, m, x, p: f(whole(x), 3),
        lambda f, m, x, p: f(x, 3),
        lambda f, m, x, p: f(torch.sqrt(x.abs() + 0.5), -1),
    ],
    A.pow.Tensor_Tensor: [
        lambda f, m, x, p: f(x.abs() + 0.5, m.v),
        lambda f, m, x, p: f(m.v.abs(), x),
        lambda f, m, x, p: f(x.abs() + 0.5, m.number),
        lambda f, m, x, p: f(whole(x).abs(), places_of(x)),
    ],
    A.pow.Scalar: [lambda f, m, x, p: f(1.5, x), lambda f, m, x, p: f(2, whole(x).abs())],
    A.dropout.default: [lambda f, m, x, p: f(x, 0.5, False)],
    A.to.dtype: [
        lambda f, m, x, p: f(x * 3, torch.int64),
        lambda f, m, x, p: f(whole(x), torch.float32) * 0.5,
        lambda f, m, x, p: f(whole(x), torch.bool),
        lambda f, m, x, p: f(x * truth(x), torch.bool),
        lambda f, m, x, p: f(truth(x), torch.int64) + 1,
        lambda f, m, x, p: x * f(m.number, torch.int64),
        lambda f, m, x, p: x * f(f(m.number, torch.bfloat16), torch.float32),
        lambda f, m, x, p: f(m.bf16, torch.float32) * x,
    ],
    A.to.device: [lambda f, m, x, p: f(x, x.device, torch.float32) * 2, lambda f, m, x, p: f(x, x.device, torch.int32)],
    A.to.dtype_layout: [
        lambda f, m, x, p: f(x, dtype=torch.int64, layout=torch.strided, device=x.device),
    ],
    A.to.other: [lambda f, m, x, p: f(x, p), lambda f, m, x, p: f(whole(x), x) * 0.5],
    A._to_copy.default: [
        lambda f, m, x, p: f(x),
        lambda f, m, x, p: f(x, dtype=torch.int32),
        lambda f, m, x, p: f(truth(x), dtype=torch.float32),
        lambda f, m, x, p: f(whole(x), dtype=torch.bool),
    ],
    A.type_as.default: [lambda f, m, x, p: f(x, p), lambda f, m, x, p: f(whole(x), x) * 0.5],
    **{
        o: [_ONE[0], lambda f, m, x, p: f(wide(x)), lambda f, m, x, p: still(x, f(m.v))]
        for o in (A.alias.default, A.clone.default, A.contiguous.default, A.detach.default)
    },
    A.lift_fresh_copy.default: [_ONE[0]],
}  # fmt: skip


def places_of(x: Any) -> Any:
    """Exponents 0 to 3."""
    return whole(x).abs().remainder(4)
