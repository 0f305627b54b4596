"""The dispatch table: in goes an op of torch, out comes the rule that lifts it. Any other op stops the compile."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from planc.compiler import hooks  # noqa: F401  (defines the custom ops)
from planc.compiler.lift import complex as z
from planc.compiler.lift import logic as c
from planc.compiler.lift import pointwise as p
from planc.compiler.lift import products as m
from planc.compiler.lift import rows as r
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
_UNARY += ("floor", "expm1", "log1p", "sign", "round", "ceil", "trunc")

_KINDS = ("Tensor", "Scalar")

_POINTWISE: dict[Target, Rule] = {
    **{getattr(_A, n).default: p.unary(n) for n in _UNARY},
    _A.reciprocal.default: p.reciprocal,
    _A.gelu.default: p.gelu,
    _A.clamp.default: p.clamp,
    _A.clamp_min.default: p.clamp,
    _A.clamp_max.default: p.clamp,
    _A.clamp.Tensor: p.clamp,
    _A.clamp_min.Tensor: p.clamp,
    _A.clamp_max.Tensor: p.clamp,
    _A.hardtanh.default: p.hardtanh,
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
    _A.div.Tensor_mode: c.divide,
    _A.div.Scalar_mode: c.divide,
    _A.floor_divide.default: p.binary("floor_divide"),
    _A.floor_divide.Scalar: p.binary("floor_divide"),
    _A.remainder.Tensor: p.binary("remainder"),
    _A.remainder.Scalar: p.binary("remainder"),
    _A.max.other: p.binary("maximum"),
    _A.min.other: p.binary("minimum"),
    _A.maximum.default: p.binary("maximum"),
    _A.minimum.default: p.binary("minimum"),
    _A.pow.Tensor_Scalar: p.power,
    _A.pow.Tensor_Tensor: p.power,
    _A.pow.Scalar: p.power,
    _A.dropout.default: p.dropout,
    **{
        o: c.cast
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

# Second names of ops, which torch.export keeps as they are written.
_POINTWISE |= {
    getattr(getattr(_A, alias), kind): _POINTWISE[getattr(getattr(_A, name), kind)]
    for alias, name in (("multiply", "mul"), ("subtract", "sub"), ("divide", "div"))
    for kind in _KINDS
}
_POINTWISE |= {_A.absolute.default: p.unary("abs"), _A.negative.default: p.unary("neg"), _A.clip.default: p.clamp}
_ALIASES = {"greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne"}

_LOGIC: dict[Target, Rule] = {
    **{getattr(getattr(_A, n), kind): c.compare(op) for n, op in _ALIASES.items() for kind in _KINDS},
    **{getattr(getattr(_A, op), kind): c.compare(op) for op in ("gt", "ge", "lt", "le", "eq", "ne") for kind in _KINDS},
    _A.logical_not.default: c.negate,
    _A.bitwise_not.default: c.negate,
    **{o: c.both("mul") for o in (_A.logical_and.default, _A.bitwise_and.Tensor, _A.__and__.Tensor)},
    **{o: c.both("maximum") for o in (_A.logical_or.default, _A.bitwise_or.Tensor, _A.__or__.Tensor)},
    **{o: c.both("ne") for o in (_A.logical_xor.default, _A.bitwise_xor.Tensor, _A.__xor__.Tensor)},
    **{o: c.where for o in (_A.where.self, _A.where.ScalarOther, _A.where.ScalarSelf, _A.where.Scalar)},
    _A.masked_fill.Scalar: c.masked_fill,
    _A.masked_fill.Tensor: c.masked_fill,
    _A.leaky_relu.default: c.leaky_relu,
    _A.elu.default: c.elu,
    _A.hardsigmoid.default: c.hard(1 / 6, 0.5, by_x=False),
    _A.hardswish.default: c.hard(1 / 6, 0.5, by_x=True),
    _A.mish.default: c.mish,
    _A.softplus.default: c.softplus,
    _A.log_sigmoid.default: c.log_sigmoid,
    _A.relu6.default: lambda call: p.bounded(call, 0.0, 6.0),
    _A.addcmul.default: c.scaled_sum("mul"),
    _A.addcdiv.default: c.scaled_sum("div"),
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
    _A.mT.default: v.transpose_last,
    _A.permute.default: v.permute,
    _A.movedim.int: v.movedim,
    **{o: v.expand for o in (_A.expand.default, _A.expand_as.default, _A.broadcast_to.default)},
    _A.broadcast_tensors.default: v.broadcast,
    _A.repeat.default: v.repeat,
    _A.repeat_interleave.self_int: v.repeat_interleave,
    _A.slice.Tensor: v.slice_,
    _A.select.int: v.select,
    **{o: v.pieces for o in (_A.split.Tensor, _A.split_with_sizes.default, _A.chunk.default)},
    _A.unbind.int: v.unbind,
    **{o: v.cat for o in (_A.cat.default, _A.concat.default, _A.concatenate.default)},
    _A.stack.default: v.stack,
    _A.tile.default: v.repeat,
    _A.slice_scatter.default: v.slice_scatter,
    _A.select_scatter.default: v.select_scatter,
    _A.copy.default: v.copy,
    _A.constant_pad_nd.default: v.pad,
    _A.pad.default: v.pad,
    _A.flip.default: v.flip,
    _A.roll.default: v.roll,
}

_ROWS: dict[Target, Rule] = {
    _A.softmax.int: r.along("softmax"),
    _A._softmax.default: r.along("softmax"),
    _A.log_softmax.int: r.log_softmax,
    _A._log_softmax.default: r.log_softmax,
    _A.cumsum.default: r.along("cumsum"),
    _A.mean.dim: r.reduction("mean"),
    _A.sum.dim_IntList: r.reduction("sum"),
    _A.sum.default: r.reduction("sum"),
    _A.amax.default: r.reduction("amax"),
    _A.amin.default: r.reduction("amin"),
    _A.prod.dim_int: r.reduction("prod"),
    _A.any.dim: r.quantified("amax"),
    _A.all.dim: r.quantified("amin"),
    _A.var.correction: r.spread_of(root=False),
    _A.std.correction: r.spread_of(root=True),
    _A.var.dim: r.spread_of(root=False),
    _A.std.dim: r.spread_of(root=True),
    _A.linalg_vector_norm.default: r.norm,
    _A.norm.ScalarOpt_dim: r.norm,
    _A.max.dim: r.extreme("amax"),
    _A.min.dim: r.extreme("amin"),
    _A.argmax.default: r.argmax,
    _A.topk.default: r.topk,
    _A.sort.default: r.sort,
    _A.sort.stable: r.sort,
    _A.argsort.default: r.argsort,
    _A.gather.default: r.gather,
    **{o: r.scatter for o in (_A.scatter.src, _A.scatter.value, _A.scatter.reduce, _A.scatter_add.default)},
    _A.scatter_reduce.two: r.scatter,
    _A.one_hot.default: r.one_hot,
}

_PRODUCTS: dict[Target, Rule] = {
    _A.linear.default: m.linear,
    _A.addmm.default: m.addmm,
    _A.mm.default: m.matmul,
    _A.bmm.default: m.matmul,
    _A.matmul.default: m.matmul,
    _A.layer_norm.default: m.layer_norm,
    _A.rms_norm.default: m.rms_norm,
    _A.baddbmm.default: m.baddbmm,
    _A.embedding.default: m.embedding,
    _A.index.Tensor: m.index,
    _A.index_select.default: m.index_select,
}

_TOKENS: dict[Target, Rule] = {
    torch.ops.planc.mask.default: t.mask,
    torch.ops.planc.attention.default: t.attention,
    torch.ops.planc.expert_linear.default: t.expert_linear,
    torch.ops.planc.weighted_sum.default: t.weighted_sum,
    torch.ops.planc.by_position.default: t.by_position,
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
            _A.empty.memory_format,
            _A.empty_like.default,
            _A.new_empty.default,
            _A.new_zeros.default,
            _A.new_ones.default,
            _A.new_full.default,
            _A.fill.Scalar,
        )
    },
    **{o: t.numbers for o in (_A.arange.default, _A.arange.start, _A.arange.start_step)},
}

_COMPLEX: dict[Target, Rule] = {
    _A.view_as_complex.default: z.view_as_complex,
    _A.polar.default: z.polar,
    _A.complex.default: z.make,
}

RULES: Mapping[Target, Rule] = {
    **_POINTWISE, **_LOGIC, **_VIEWS, **_ROWS, **_PRODUCTS, **_TOKENS, **_COMPLEX,
}  # fmt: skip

# Ops that know complex tensors.
COMPLEX_RULES: Mapping[Target, Rule] = {
    _A.view_as_real.default: z.view_as_real,
    _A.real.default: z.part("real"),
    _A.imag.default: z.part("imag"),
    _A.mul.Tensor: z.multiply,
    _A.add.Tensor: z.added("add"),
    _A.sub.Tensor: z.added("sub"),
    _A.div.Tensor: z.divide,
}

# Ops that do to a complex tensor what they do to its real and its imaginary part.
BY_PARTS = frozenset(
    {*_VIEWS, _A.neg.default, _A.mul.Scalar, _A.div.Scalar, _A.mean.dim, _A.sum.dim_IntList, _A.index.Tensor}
    | {_A.index_select.default, _A.gather.default}
    | {o for o, rule in RULES.items() if rule in (p.same, c.cast)}
) - {_A.pad.default, _A.constant_pad_nd.default}

# Views that leave an attention mask what it is.
MASK_VIEWS = frozenset({o for o, rule in RULES.items() if rule in (c.cast, p.same, v.slice_, v.expand)})

# Ops whose rules go by no axis but the last, so that tokens merged with another axis may be two axes to them.
MERGED = frozenset({*_POINTWISE, *_LOGIC, _A.linear.default, _A.repeat_interleave.self_int}) | {
    o for o, rule in RULES.items() if rule in (v.view, v.repeat)
}

# Ops that are refused for what they do to tokens, with the reason.
_STATE = "carries a state from token to token (a convolution over them); such models are not compiled yet"
_REASONS: Mapping[Target, str] = {o: _STATE for o in (_A.conv1d.default, _A.conv1d.padding, _A.convolution.default)}


def refusal_of(target: Target) -> str | None:
    """Why an op is refused, where there is more to say than that it is not known."""
    return _REASONS.get(target)


def closed_set() -> list[str]:
    """The names of the ops that can be lifted, without overloads, for documents."""
    names = {
        str(o).partition(".")[2].rpartition(".")[0] for o in (*RULES, *COMPLEX_RULES) if str(o).startswith("aten.")
    }
    return sorted(names)
