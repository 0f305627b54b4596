"""Cases of ops that move, select, join and repeat: features in every order, negative axes, axes that are not stored."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.compiler.lift.cases.common import FEW, A, Case, Cases, each, heads, places, still, truth, whole, wide


def _turned(x: Tensor) -> Tensor:
    """[1, 4, T, 6]."""
    return heads(x).transpose(1, 2)


def _flat(x: Tensor) -> Tensor:
    """[T, 24]."""
    return x.view(-1, 24)


_VIEW: list[Case] = [
    lambda f, m, x, p: f(x, [1, -1, 4, 6]),
    lambda f, m, x, p: f(f(x, [1, -1, 2, 2, 6]) * 2, [1, -1, 4, 6]),
    lambda f, m, x, p: f(f(x, [-1, 24]) * m.v, [1, -1, 2, 12]),
    lambda f, m, x, p: f(f(p, [-1, 1]) * 2, [1, -1]),
    lambda f, m, x, p: still(x, f(m.h, [2, 12]) * f(m.v, [2, 12])),
    lambda f, m, x, p: f(x, [1, x.shape[1], 3, 8]),
]
_RESHAPE: list[Case] = [
    *_VIEW,
    lambda f, m, x, p: f(_turned(x).transpose(1, 2), [1, -1, 24]),
    lambda f, m, x, p: f(heads(x).transpose(2, 3), [1, -1, 24]),
    lambda f, m, x, p: f(heads(x)[..., :3], [1, -1, 12]),
    lambda f, m, x, p: f(wide(x), [1, -1, 24]),
    lambda f, m, x, p: f(x[..., :1].expand(1, -1, 12), [1, -1, 3, 4]),
]
_SQUEEZE: list[Case] = [lambda f, m, x, p: f(x[..., :1]).unsqueeze(0), lambda f, m, x, p: f(x).unsqueeze(0)]
_CAT: list[Case] = [
    lambda f, m, x, p: f([x, x * 2, x[..., :5]], -1),
    lambda f, m, x, p: f([heads(x), wide(x)], 2),
    lambda f, m, x, p: f([heads(x), wide(x), m.h.expand(1, x.shape[1], 4, 6)], dim=-1),
    lambda f, m, x, p: f([x, whole(x)], 2),
    lambda f, m, x, p: f([truth(x), truth(-x)], 2),
    lambda f, m, x, p: f([x], -1),
    lambda f, m, x, p: f([_turned(x)[..., 3:], _turned(x)[..., :3]], -1).transpose(1, 2),
    lambda f, m, x, p: still(x, f([m.h, m.h * 2], 0)),
    lambda f, m, x, p: f([x[..., 24:], x, torch.zeros(1, x.shape[1], 3, device=x.device)], -1),
]
_SAME_SHAPE: list[Case] = [
    lambda f, m, x, p: f(m.v, x) * x,
    lambda f, m, x, p: f(x[..., :1], x) + x,
    lambda f, m, x, p: f(m.h[:, :1], heads(x)),
]
_SIZED: list[Case] = [
    lambda f, m, x, p: f(x[..., None], [1, -1, 24, 3]),
    lambda f, m, x, p: f(m.v, [1, x.shape[1], 24]),
    lambda f, m, x, p: f(m.h[:, None], [4, 2, 6]).reshape(48) + x[..., :1],
    lambda f, m, x, p: f(heads(x)[:, :, :, None], [1, -1, 4, 2, 6]).sum(3),
]
_PAD: list[Case] = [
    lambda f, m, x, p: f(x, [1, 2]),
    lambda f, m, x, p: f(x, [0, 3], value=1.5),
    lambda f, m, x, p: f(heads(x), [1, 0, 2, 1], value=-float("inf")),
    lambda f, m, x, p: f(whole(x), [2, 0], value=7),
    lambda f, m, x, p: f(wide(x), [0, 1]),
    lambda f, m, x, p: f(x, [0, 0, 0, 0]),
]
_SPLIT = {
    A.split.Tensor: 9,
    A.split_with_sizes.default: [5, 12, 7],
    A.chunk.default: 5,
}


def _scattered(f: Any, m: nn.Module, x: Tensor, p: Tensor) -> Any:
    """Written piece by piece into what is empty, as code that fills a buffer in place becomes."""
    out = f(x.new_empty(1, x.shape[1], 48), x * 2, 2, 0, 24)
    return f(out, x, -1, 24)


def _by_steps(f: Any, m: nn.Module, x: Tensor, p: Tensor) -> Any:
    out = f(torch.empty_like(x), x[..., 12:], -1, 0, None, 2)
    return f(out, x[..., :12], -1, 1, 24, 2)


def _rows(f: Any, m: nn.Module, x: Tensor, p: Tensor) -> Any:
    return f(torch.zeros_like(x), x * 2, 1), f(torch.zeros_like(x), x * 2, 1, 0, x.shape[1])


CASES: Cases = {
    A.view.default: _VIEW,
    A._unsafe_view.default: _VIEW[:FEW],
    A.reshape.default: _RESHAPE,
    A.view_as.default: [lambda f, m, x, p: f(x, heads(x) * 2), lambda f, m, x, p: f(heads(x) * 2, x)],
    A.flatten.using_ints: [
        lambda f, m, x, p: f(heads(x), 2),
        lambda f, m, x, p: f(heads(x).transpose(2, 3), -2, -1),
        lambda f, m, x, p: f(wide(x), 2) * x,
        lambda f, m, x, p: f(x, 0, 1)[None],
        lambda f, m, x, p: f(m.h) * x,
    ],
    A.unflatten.int: [
        lambda f, m, x, p: f(x, -1, [2, 12]),
        lambda f, m, x, p: f(x, 2, [3, -1]),
        lambda f, m, x, p: f(x[..., :1].expand(1, -1, 24), 2, [4, 6]),
    ],
    A.unsqueeze.default: [
        lambda f, m, x, p: f(x, -1).expand(1, -1, 24, 2),
        lambda f, m, x, p: f(x, 2) * m.h.flatten()[:, None][:2],
        lambda f, m, x, p: f(p, -1) * x,
        lambda f, m, x, p: f(m.v, 0) * x,
    ],
    A.squeeze.default: _SQUEEZE,
    A.squeeze.dim: [
        lambda f, m, x, p: f(x[..., :1], -1),
        lambda f, m, x, p: f(x, -1),
        lambda f, m, x, p: f(x, 0)[None],
        lambda f, m, x, p: f(heads(x)[:, :, 2:3], 2),
    ],
    A.squeeze.dims: [lambda f, m, x, p: f(heads(x)[:, :, 1:2], [0, -2]).unsqueeze(0), lambda f, m, x, p: f(x, [2])],
    **{
        o: [
            lambda f, m, x, p: f(f(heads(x), 1, 2) * 2, 1, -2),
            lambda f, m, x, p: f(heads(x), -1, -2),
            lambda f, m, x, p: still(x, f(m.h, 0, 1)),
            lambda f, m, x, p: f(wide(x), 2, 3),
        ]
        for o in (A.transpose.int, A.swapaxes.default)
    },
    A.t.default: [
        lambda f, m, x, p: f(f(_flat(x)) * 2)[None],
        lambda f, m, x, p: still(x, f(m.h)),
        lambda f, m, x, p: x * f(m.v),
    ],
    A.numpy_T.default: [lambda f, m, x, p: f(f(_flat(x)))[None], lambda f, m, x, p: still(x, f(m.h))],
    A.mT.default: [lambda f, m, x, p: f(f(heads(x)) * 2), lambda f, m, x, p: still(x, f(m.experts))],
    A.permute.default: [
        lambda f, m, x, p: f(f(heads(x), [0, 2, -1, 1]) * 3, [0, 3, 1, 2]),
        lambda f, m, x, p: f(heads(x), [0, 1, 3, 2]).exp(),
        lambda f, m, x, p: still(x, f(m.experts, [2, 0, 1])),
    ],
    A.movedim.int: [
        lambda f, m, x, p: f(heads(x), 2, 3),
        lambda f, m, x, p: f(f(heads(x), 1, -1) * 2, 3, 1),
    ],
    A.expand.default: _SIZED,
    A.broadcast_to.default: _SIZED,
    A.expand_as.default: _SAME_SHAPE,
    A.broadcast_tensors.default: [
        lambda f, m, x, p: tuple(f([x, m.v])),
        lambda f, m, x, p: tuple(f([m.h[:, :1], wide(x), heads(x)])),
    ],
    **{
        o: [
            lambda f, m, x, p: f(x, [1, 1, 3]),
            lambda f, m, x, p: f(x[..., :1], [1, 1, 5]),
            lambda f, m, x, p: f(heads(x), [1, 1, 2, 1]),
            lambda f, m, x, p: f(m.h, [1, x.shape[1], 1, 1]),
            lambda f, m, x, p: f(m.v, [1, x.shape[1], 2]),
            lambda f, m, x, p: f(_flat(x), [3, 1]).view(3, -1, 24).sum(0)[None],
            lambda f, m, x, p: f(wide(x), [1, 1, 1, 2]),
        ]
        for o in (A.repeat.default, A.tile.default)
    },
    A.repeat_interleave.self_int: [
        lambda f, m, x, p: f(x, 2, -1),
        lambda f, m, x, p: f(heads(x), 3, dim=2),
        lambda f, m, x, p: f(heads(x)[:, :, :1], 3, dim=2),
        lambda f, m, x, p: f(_flat(x), 2, 0).view(-1, 2, 24).sum(1)[None],
        lambda f, m, x, p: still(x, f(m.h, 2, 0)),
        lambda f, m, x, p: f(x, 2, 2, output_size=48),
    ],
    A.slice.Tensor: [
        lambda f, m, x, p: f(x, 2, 3, 9),
        lambda f, m, x, p: f(x, -1, -5),
        lambda f, m, x, p: f(x, 2, None, -5),
        lambda f, m, x, p: f(x, 1) * 2,
        lambda f, m, x, p: f(x, 2, 1, None, 2),
        lambda f, m, x, p: f(x, 2, 0, 24, 3),
        lambda f, m, x, p: f(x, 2, 1, 20, 7),
        lambda f, m, x, p: f(f(heads(x), 3, 1, 5), 2, -3, -1).flatten(2),
        lambda f, m, x, p: f(wide(x), 3, 2, 4),
        lambda f, m, x, p: still(x, f(m.h, 0, 1, 3)),
        lambda f, m, x, p: f(torch.cat([x, x * 2], -1), -1, 24),
        lambda f, m, x, p: f(torch.cat([x, x * 2], -1), -1, 20, 30),
    ],
    A.select.int: [
        lambda f, m, x, p: f(x, -1, 3),
        lambda f, m, x, p: f(heads(x), 2, -1),
        lambda f, m, x, p: f(wide(x), 3, 5),
        lambda f, m, x, p: f(x, 0, 0)[None],
        lambda f, m, x, p: x * f(m.v, 0, 2),
    ],
    **{
        o: [
            *each(lambda n, f, m, x, p: tuple(f(x, n, -1))[::-1], size),
            *each(lambda n, f, m, x, p: f(x[..., :1].expand(1, -1, 24), n, 2)[1], size),
        ]
        for o, size in _SPLIT.items()
    },
    A.unbind.int: [
        lambda f, m, x, p: tuple(f(heads(x), -2))[::-1],
        lambda f, m, x, p: tuple(f(wide(x), 3)),
        lambda f, m, x, p: f(m.h)[1] * x[..., :6],
    ],
    A.cat.default: _CAT,
    **{o: _CAT[:FEW] for o in (A.concat.default, A.concatenate.default)},
    A.stack.default: [
        lambda f, m, x, p: f([x, -x], -1),
        lambda f, m, x, p: f([x, -x, m.v.expand(1, x.shape[1], 24)], 2),
        lambda f, m, x, p: f([x[..., 0], p.float()], dim=2),
        lambda f, m, x, p: f([heads(x), wide(x)], -2),
        lambda f, m, x, p: still(x, f([m.v, m.v * 2])),
        lambda f, m, x, p: f([_turned(x), _turned(x) * 2], 2).sum(2).transpose(1, 2),
    ],
    A.slice_scatter.default: [
        _scattered,
        _by_steps,
        _rows,
        lambda f, m, x, p: f(x, x[..., :4] * 3, -1, 5, 9),
        lambda f, m, x, p: f(x, m.h.expand(1, x.shape[1], 4, 6)[:, :, 0], 2, -6),
        lambda f, m, x, p: f(wide(x), heads(x)[..., :2], 3, 1, 3),
        lambda f, m, x, p: f(whole(x), x[..., :2], 2, 0, 2),
        lambda f, m, x, p: f(x, x * 2, 2),
    ],
    A.select_scatter.default: [
        lambda f, m, x, p: f(x, p.float(), -1, 3),
        lambda f, m, x, p: f(heads(x), heads(x)[:, :, 0] * 2, 2, -1),
        lambda f, m, x, p: f(torch.zeros_like(heads(x)), x[..., :4], 3, 0),
        lambda f, m, x, p: f(whole(x), places(x, 5)[..., 0], 2, 23),
    ],
    A.copy.default: [
        lambda f, m, x, p: f(torch.empty_like(x), m.v) * x,
        lambda f, m, x, p: f(whole(x), x),
        lambda f, m, x, p: f(x, truth(x)),
    ],
    A.constant_pad_nd.default: _PAD[:FEW],
    A.pad.default: [*_PAD, lambda f, m, x, p: f(x, [1, 2], "constant", None)],
    A.flip.default: [
        lambda f, m, x, p: f(x, [-1]),
        lambda f, m, x, p: f(heads(x), [2, 3]),
        lambda f, m, x, p: f(wide(x), [3]),
        lambda f, m, x, p: still(x, f(m.h, [0])),
    ],
    A.roll.default: [
        lambda f, m, x, p: f(x, [5], [-1]),
        lambda f, m, x, p: f(x, [-7], [2]),
        lambda f, m, x, p: f(heads(x), [1, 50], [2, 3]),
        lambda f, m, x, p: f(wide(x), [2], [3]),
        lambda f, m, x, p: f(x, [24], [-1]),
    ],
}  # fmt: skip
