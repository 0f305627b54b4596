"""The dispatch table: in goes an op of torch, out comes the rule that lifts it. Any other op stops the compile."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from planc.compiler import hooks  # noqa: F401  (defines the two custom ops)
from planc.compiler.lift import pointwise as p
from planc.compiler.lift import products as m
from planc.compiler.lift import tokens as t
from planc.compiler.lift import views as v
from planc.compiler.lift.call import Call, Lift

Rule = Callable[[Call], Lift]
Target = Any

_A = torch.ops.aten

_UNARY: tuple[str, ...] = (
    "neg",
    "abs",
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "square",
    "cos",
    "sin",
    "tanh",
    "erf",
    "sigmoid",
    "silu",
    "relu",
)
_UNARY += ("floor", "softplus")

_POINTWISE: dict[Target, Rule] = {
    **{getattr(_A, n).default: p.unary(n) for n in _UNARY},
    _A.reciprocal.default: p.reciprocal,
    _A.gelu.default: p.gelu,
    _A.clamp.default: p.clamp,
    _A.clamp_min.default: p.clamp,
    _A.clamp_max.default: p.clamp,
    _A.add.Tensor: p.binary("add"),
    _A.add.Scalar: p.binary("add"),
    _A.sub.Tensor: p.binary("sub"),
    _A.sub.Scalar: p.binary("sub"),
    _A.rsub.Tensor: p.reversed_binary("sub"),
    _A.rsub.Scalar: p.reversed_binary("sub"),
    _A.mul.Tensor: p.binary("mul"),
    _A.mul.Scalar: p.binary("mul"),
    _A.div.Tensor: p.binary("div"),
    _A.div.Scalar: p.binary("div"),
    _A.maximum.default: p.binary("maximum"),
    _A.minimum.default: p.binary("minimum"),
    _A.pow.Tensor_Scalar: p.power,
    _A.pow.Tensor_Tensor: p.power,
    _A.pow.Scalar: p.power,
    _A.dropout.default: p.dropout,
    **{
        o: p.cast
        for o in (_A.to.dtype, _A.to.device, _A.to.dtype_layout, _A.to.other, _A._to_copy.default, _A.type_as.default)
    },
    **{
        o: p.same
        for o in (
            _A.alias.default,
            _A.clone.default,
            _A.contiguous.default,
            _A.detach.default,
            _A.lift_fresh_copy.default,
        )
    },
}

_VIEWS: dict[Target, Rule] = {
    **{o: v.view for o in (_A.view.default, _A._unsafe_view.default, _A.reshape.default, _A.view_as.default)},
    _A.flatten.using_ints: v.view,
    _A.unflatten.int: v.view,
    _A.unsqueeze.default: v.unsqueeze,
    **{o: v.squeeze for o in (_A.squeeze.default, _A.squeeze.dim, _A.squeeze.dims)},
    _A.transpose.int: v.transpose,
    _A.swapaxes.default: v.transpose,
    _A.t.default: v.flip_axes,
    _A.numpy_T.default: v.flip_axes,
    _A.permute.default: v.permute,
    _A.movedim.int: v.movedim,
    **{o: v.expand for o in (_A.expand.default, _A.expand_as.default, _A.broadcast_to.default)},
    _A.repeat.default: v.repeat,
    _A.repeat_interleave.self_int: v.repeat_interleave,
    _A.slice.Tensor: v.slice_,
    _A.select.int: v.select,
    **{o: v.pieces for o in (_A.split.Tensor, _A.split_with_sizes.default, _A.chunk.default)},
    _A.unbind.int: v.unbind,
    _A.cat.default: v.cat,
    _A.stack.default: v.stack,
}

_PRODUCTS: dict[Target, Rule] = {
    _A.linear.default: m.linear,
    _A.addmm.default: m.addmm,
    _A.mm.default: m.matmul,
    _A.bmm.default: m.matmul,
    _A.matmul.default: m.matmul,
    _A.layer_norm.default: m.layer_norm,
    _A.rms_norm.default: m.rms_norm,
    _A.mean.dim: m.reduction("mean"),
    _A.sum.dim_IntList: m.reduction("sum"),
    _A.amax.default: m.reduction("amax"),
    _A.embedding.default: m.embedding,
    _A.index.Tensor: m.index,
    _A.index_select.default: m.index_select,
}

_TOKENS: dict[Target, Rule] = {
    torch.ops.planc.mask.default: t.mask,
    torch.ops.planc.attention.default: t.attention,
    **{
        o: t.made
        for o in (
            _A.full.default,
            _A.full_like.default,
            _A.zeros.default,
            _A.zeros_like.default,
            _A.ones.default,
            _A.ones_like.default,
            _A.scalar_tensor.default,
        )
    },
    **{o: t.numbers for o in (_A.arange.default, _A.arange.start, _A.arange.start_step)},
}

RULES: Mapping[Target, Rule] = {**_POINTWISE, **_VIEWS, **_PRODUCTS, **_TOKENS}

# Views that leave an attention mask what it is.
MASK_VIEWS = frozenset({o for o, r in RULES.items() if r in (p.cast, p.same, v.slice_, v.expand)})


def closed_set() -> str:
    """The names of the ops that can be lifted, for an error's reader."""
    return ", ".join(sorted({str(o).removeprefix("aten.").partition(".")[0] for o in RULES}))
