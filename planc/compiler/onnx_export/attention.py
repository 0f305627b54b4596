"""Attention as ONNX: the prompt is the whole sequence, so keys and values need no cache; masks go by index.

Scores are [Hk, Hq/Hk, T, T]. A cache of fewer bits leaves its rounding behind, so that logits are those of the plan.
"""

from collections.abc import Sequence
from typing import Any

from planc.compiler.ir.graph import Node
from planc.compiler.ir.quant import LIMITS
from planc.compiler.onnx_export.emitter import Emitter


def kv_append(e: Emitter, n: Node) -> Sequence[str]:
    """Nothing is written: the attention of this layer reads what would be."""
    layer: Any = n.attr("layer")
    dtype = str(n.attr("dtype"))
    k, v = (_rounded(e, i, f"{e.value(i)}/{dtype}", dtype) for i in n.inputs[:2])
    e.caches[layer] = (
        e.once(f"layer{layer}/keys", lambda: _keys(e, k)),
        e.once(f"layer{layer}/values", lambda: _values(e, v)),
    )
    return ()


def _rounded(e: Emitter, name: str, rounded: str, dtype: str) -> str:
    x = e.value(name)
    if dtype in LIMITS:
        return e.once(rounded, lambda: _narrowed(e, x, dtype))
    return x if dtype == "f32" else e.once(rounded, lambda: e.cast(e.cast(x, dtype), "f32"))


def _narrowed(e: Emitter, x: str, dtype: str) -> str:
    """Each vector as codes times its scale; one of zeros has scale 0."""
    limit = float(LIMITS[dtype])
    scale = e.op("Div", e.op("ReduceMax", e.op("Abs", x), e.ints(-1)), e.const(limit))
    divisor = e.op("Where", e.op("Equal", scale, e.const(0.0)), e.const(1.0), scale)
    ratio = e.op("Clip", e.op("Div", x, divisor), e.const(-limit), e.const(limit))
    return e.op("Mul", e.op("Round", ratio) if dtype == "i8" else _e3m4(e, ratio), scale)


def _e3m4(e: Emitter, x: str) -> str:
    """float32 rounded as e3m4, which ONNX does not have: to five bits, below 0.25 to multiples of 2^-6."""
    high = e.op("Mul", x, e.const(2.0**19 + 1))
    coarse = e.op("Sub", high, e.op("Sub", high, x))  # the low 19 of 24 bits cancel
    fine = e.op("Div", e.op("Round", e.op("Mul", x, e.const(64.0))), e.const(64.0))
    return e.op("Where", e.op("Less", e.op("Abs", x), e.const(0.25)), fine, coarse)


def _keys(e: Emitter, k: str) -> str:
    """[T, Hk, D] -> [Hk, 1, D, T]."""
    return e.op("Unsqueeze", e.op("Transpose", k, perm=(1, 2, 0)), e.ints(1))


def _values(e: Emitter, v: str) -> str:
    """[T, Hk, Dv] -> [Hk, 1, T, Dv]."""
    return e.op("Unsqueeze", e.op("Transpose", v, perm=(1, 0, 2)), e.ints(1))


def paged_attention(e: Emitter, n: Node) -> Sequence[str]:
    layer: Any = n.attr("layer")
    heads: Any = n.attr("heads")
    keys, values = e.caches[layer]
    return (_attend(e, n, keys, values, heads, n.inputs[5:]),)


def attention(e: Emitter, n: Node) -> Sequence[str]:
    k, v = (e.value(i) for i in n.inputs[1:3])
    return (_attend(e, n, _keys(e, k), _values(e, v), int(e.type(n.inputs[1]).shape[1]), n.inputs[3:]),)


def _attend(e: Emitter, n: Node, keys: str, values: str, heads: int, rest: Sequence[str]) -> str:
    _, count, dim = e.type(n.inputs[0]).shape
    group = int(count) // heads
    q = e.op("Reshape", e.value(n.inputs[0]), e.ints(0, heads, group, int(dim)))
    scores = e.op("MatMul", e.op("Transpose", q, perm=(1, 2, 0, 3)), keys)
    scores = e.op("Mul", scores, e.const(n.attr("scale")))
    attrs = dict(n.attrs)
    if attrs["softcap"]:
        cap = e.const(attrs["softcap"])
        scores = e.op("Mul", e.op("Tanh", e.op("Div", scores, cap)), cap)
    if attrs.get("alibi"):
        slopes = e.op("Reshape", e.value(rest[-1]), e.ints(heads, group, 1, 1))
        scores = e.op("Add", scores, e.op("Mul", slopes, _distance(e)))
    scores = e.op("Where", _mask(e, str(attrs["kind"]), attrs["window"]), scores, e.const(-float("inf")))
    p = _weights(e, scores, e.value(rest[0]) if attrs.get("sinks") else None, heads, group)
    y = e.op("Transpose", e.op("MatMul", p, values), perm=(2, 0, 1, 3))
    return e.op("Reshape", y, e.ints(0, int(count), int(n.out.type.shape[2])))


def _weights(e: Emitter, scores: str, sinks: str | None, heads: int, group: int) -> str:
    """The softmax; a sink is one more key, which has no value."""
    if sinks is None:
        return e.op("Softmax", scores, axis=-1)
    column = e.op("Reshape", sinks, e.ints(heads, group, 1, 1))
    shape = e.op("Concat", e.ints(1, 1), e.length(), e.ints(1), axis=0)
    wide = e.op("Concat", scores, e.op("Expand", column, shape), axis=-1)
    return e.op("Slice", e.op("Softmax", wide, axis=-1), e.ints(0), e.ints(-1), e.ints(-1))


def _index(e: Emitter, axis: int) -> str:
    """The tokens' numbers, int64[T, 1] of queries (axis 1) or [1, T] of keys (axis 0)."""
    zero, one = e.const(0, "i64"), e.const(1, "i64")
    each = e.once("tokens/index", lambda: e.op("Range", zero, e.op("Squeeze", e.length()), one), common=True)
    name = "keys" if axis == 0 else "queries"
    return e.once(f"tokens/{name}", lambda: e.op("Unsqueeze", each, e.ints(axis)), common=True)


def _distance(e: Emitter) -> str:
    """f32[T, T]: from the query back to the key, 0 or less."""
    q, k = _index(e, 1), _index(e, 0)
    return e.once("tokens/distance", lambda: e.cast(e.op("Sub", k, q), "f32"), common=True)


def _mask(e: Emitter, kind: str, window: Any) -> str:
    """bool[T, T]: which keys a query sees, the same for every layer of that kind."""
    return e.once(f"mask/{kind}{window or ''}", lambda: _visible(e, kind, e.const(window, "i64")), common=True)


def _visible(e: Emitter, kind: str, window: str) -> str:
    q, k = _index(e, 1), _index(e, 0)
    seen = e.op("LessOrEqual", k, q)
    if kind == "sliding":
        return e.op("And", seen, e.op("Greater", k, e.op("Sub", q, window)))
    if kind == "chunked":
        return e.op("And", seen, e.op("Equal", e.op("Div", k, window), e.op("Div", q, window)))
    return seen
