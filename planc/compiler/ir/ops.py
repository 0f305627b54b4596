"""The op table: in goes an op's name, out come its type rule, its numpy reference, its shard rule and its effects.

Axis 0 of an activation is the token axis (`T`, or `R` after row selection); weights have none. Binary ops broadcast
like numpy, aligned at the last axis. References compute in float32 and are the one oracle of passes and kernels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planc.compiler.ir import (
    collectives,
    fused,
    gated,
    infer,
    infer_rows,
    operands,
    refs,
    refs_attention,
    refs_experts,
    refs_quant,
    refs_select,
    rounded,
)
from planc.compiler.ir.types import DTYPES, Attr, TensorType

Attrs = Mapping[str, Attr]
Infer = Callable[[Attrs, Sequence[TensorType]], tuple[TensorType, ...]]
Ref = Callable[[Attrs, Sequence[np.ndarray], Sequence[TensorType]], tuple[np.ndarray, ...]]


@dataclass(frozen=True)
class Op:
    """One row. `attrs` maps each allowed attribute to True when it must be present. `inplace` is the input whose buffer
    the first output may take. `shard` names the rule by which tensor parallelism may split it, see shard_rules.py. A
    `view` costs nothing at run time: its output is its input's memory under another shape. The reference of a
    `collective` takes the input of every rank."""

    name: str
    infer: Infer
    ref: Ref
    attrs: Mapping[str, bool]
    shard: str = "elementwise"
    effect: bool = False
    inplace: int | None = None
    view: bool = False
    collective: bool = False


def _pointwise() -> list[Op]:
    rows = [Op(n, infer.same, refs.unary(fn), {}, inplace=0) for n, fn in refs.UNARY.items()]
    scalar = {"scalar": False, "reversed": False}
    rows += [Op(n, infer.binary, refs.binary(fn), scalar, inplace=0) for n, fn in refs.BINARY.items()]
    rows += [Op(n, infer.compare, refs.compare(fn), scalar, inplace=0) for n, fn in refs.COMPARE.items()]
    rows += [
        Op("gelu", infer.same, refs.gelu, {"tanh": True}, inplace=0),
        Op("cast", infer.cast, refs.cast, {"dtype": True}),
        Op("where", infer.where, refs.where, {}, inplace=0),
        Op("fused", fused.infer, fused.fused, {"code": True}, inplace=0),
    ]
    return rows


def _reductions() -> list[Op]:
    return [Op(n, infer.reduce_last, refs.reduction(fn), {}, shard="rows") for n, fn in refs.REDUCE.items()]


_SLICE = {"axis": True, "start": True, "stop": True}


def _rows() -> list[Op]:
    return [
        Op("softmax", infer.same, refs_select.softmax, {}, shard="rows", inplace=0),
        Op("cumsum", infer.same, refs_select.cumsum, {}, shard="rows", inplace=0),
        Op("argmax", infer_rows.argmax, refs_select.argmax, {}, shard="rows"),
        Op("topk", infer_rows.topk, refs_select.topk, {"k": True, "largest": True}, shard="rows"),
        Op("gather", infer_rows.gather, refs_select.gather, {}, shard="rows"),
        Op("scatter", infer_rows.scatter, refs_select.scatter, {"scalar": False, "add": False}, shard="rows"),
    ]


def _structural() -> list[Op]:
    return [
        Op("reshape", infer.reshape, refs.reshape, {"shape": True}, shard="reshape", view=True),
        Op("transpose", infer.transpose, refs.transpose, {"perm": True}, shard="transpose"),
        Op("slice", infer.slice_, refs.slice_, _SLICE, shard="slice", view=True),
        Op("concat", infer.concat, refs.concat, {"axis": True}, shard="concat"),
        Op("expand", infer.expand, refs.expand, {"shape": True, "rows": False}, shard="expand"),
        Op("copy", infer.same, refs.copy, {}),
        Op("take_rows", infer.take_rows, refs.take_rows, {}, shard="take_rows"),
    ]


_NORM = {"eps": True}
_KV = {"layer": True, "heads": True, "k_dim": True, "v_dim": True, "block": True, "dtype": True}
_KV |= {"k_offset": True, "v_offset": True, "page_bytes": True, "k_scale_offset": False, "v_scale_offset": False}
_MASK = {"scale": True, "kind": True, "window": True, "softcap": True, "layer": True}
_HEADS = {"sinks": False, "alibi": False}
_ROUNDING = rounded.ATTRS


def _model() -> list[Op]:
    return [
        Op("embedding", infer.embedding, refs.embedding, {"store": False}, shard="vocab"),
        Op("linear", infer.linear, refs.linear, {"bias": False, "store": False}, shard="linear"),
        Op("quantize_rows", operands.rows_types, refs_quant.quantize_rows, _ROUNDING, shard="replicate"),
        Op("qlinear", infer.qlinear, refs_quant.qlinear, {"scheme": True, "bias": False}, shard="replicate"),
        Op("qembedding", infer.qembedding, refs_quant.qembedding, {"scheme": True}, shard="replicate"),
        Op("rms_norm", infer.same, refs.rms_norm, _NORM, shard="rows", inplace=0),
        Op("layer_norm", infer.same, refs.layer_norm, {**_NORM, "bias": False}, shard="rows", inplace=0),
        Op("add_rms_norm", infer.add_norm, refs.add_rms_norm, _NORM, shard="rows"),
        Op("add_layer_norm", infer.add_norm, refs.add_layer_norm, {**_NORM, "bias": False}, shard="rows"),
        Op("act_mul", infer.act_mul, refs.act_mul, {"act": True}),
        Op("rotary", infer.rotary, refs.rotary, {"interleaved": True}, shard="rows"),
        Op("attention", infer.attention, refs_attention.attention, {**_MASK, **_HEADS}, shard="heads"),
        Op("kv_append", infer.kv_append, refs_attention.kv_append, _KV, shard="replicate", effect=True),
        Op(
            "rotary_append",
            infer.rotary_append,
            refs_attention.rotary_append,
            {"interleaved": True, **_KV},
            shard="replicate",
            effect=True,
        ),
        Op(
            "paged_attention",
            infer.paged,
            refs_attention.paged_attention,
            {**_MASK, **_KV, **_HEADS},
            shard="replicate",
        ),
        Op("matmul", infer_rows.matmul, refs_experts.matmul, {}, shard="replicate"),
    ]


def _rounded() -> list[Op]:
    """What makes rows and rounds them."""
    made, attrs = {op.name: op for op in _model()}, {**_ROUNDING, "shift": False}

    def both(op: Op) -> Op:
        name, infer_, ref = rounded.name(op.name), rounded.infer(op.infer), rounded.ref(op.ref)
        return Op(name, infer_, ref, {**op.attrs, **attrs}, shard="replicate")

    return [both(made[name]) for name in rounded.FIRST]


def _gated() -> list[Op]:
    """Products and the act_mul of their halves."""
    made = {op.name: op for op in _model()}

    def both(op: Op) -> Op:
        return Op(
            gated.name(op.name), gated.infer(op.infer), gated.ref(op.ref), {**op.attrs, "act": True}, shard="replicate"
        )

    return [both(made[name]) for name in gated.PRODUCTS]


def _experts() -> list[Op]:
    q, x = {"scheme": True, "bias": False}, {"store": False, "bias": False}
    return [
        Op("expert_linear", infer_rows.expert_linear, refs_experts.expert_linear, x, shard="experts"),
        Op("qexpert_linear", infer_rows.qexpert_linear, refs_quant.qexpert_linear, q, shard="replicate"),
        Op("weighted_sum", infer_rows.weighted_sum, refs_experts.weighted_sum, {}, shard="weighted_sum"),
    ]


def _collectives() -> list[Op]:
    reduce, gather = {"ranks": True}, {"ranks": True, "starts": True, "size": True}
    types, refs_ = (collectives.reduce_type, collectives.gather_type), (collectives.all_reduce, collectives.all_gather)
    return [
        Op("all_reduce", types[0], refs_[0], reduce, shard="replicate", inplace=0, collective=True),
        Op("all_gather", types[1], refs_[1], gather, shard="replicate", collective=True),
    ]


_TABLES = (_pointwise, _reductions, _rows, _structural, _model, _rounded, _gated, _experts, _collectives)
# What may write its first result narrower than it computes it, as the attribute `out` says.
NARROWING = frozenset({"rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "act_mul"})
NARROWING |= {"rotary_append", "paged_attention"}


def _narrowing(op: Op) -> Op:
    def infer_(attrs: Attrs, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
        first, *rest = op.infer(attrs, types)
        return (replace(first, dtype=str(attrs.get("out", first.dtype))), *rest)

    infer_.__doc__ = op.infer.__doc__

    def ref(attrs: Attrs, args: Sequence[np.ndarray], types: Sequence[TensorType]) -> tuple[np.ndarray, ...]:
        first, *rest = op.ref(attrs, args, types)
        return (first.astype(DTYPES[str(attrs["out"])]) if "out" in attrs else first, *rest)

    return replace(op, attrs={**op.attrs, "out": False}, infer=infer_, ref=ref)


_ROWS = [op for table in _TABLES for op in table()]
OPS: Mapping[str, Op] = {op.name: _narrowing(op) if op.name in NARROWING else op for op in _ROWS}
# Ops that write a step's keys and values to the cache, and where the keys are among their inputs; values are next.
APPENDS: Mapping[str, int] = {"kv_append": 0, "rotary_append": 1}
