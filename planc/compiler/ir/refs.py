"""Numpy references of the op table: in go attributes, arrays and types, out come arrays. Plain, float32, never fast."""

from collections.abc import Callable, Mapping, Sequence
from math import erf as _erf

import numpy as np

from planc.compiler.ir.packing import unpack
from planc.compiler.ir.quant import SCHEMES
from planc.compiler.ir.types import DTYPES, PACKED, Attr, TensorType

Array = np.ndarray
Attrs = Mapping[str, Attr]
Types = Sequence[TensorType]
Out = tuple[Array, ...]
Ref = Callable[[Attrs, Sequence[Array], Types], Out]


def _int(attrs: Attrs, name: str) -> int:
    value = attrs[name]
    assert isinstance(value, int)
    return value


def _float(attrs: Attrs, name: str) -> float:
    value = attrs[name]
    assert isinstance(value, float | int)
    return float(value)


_verf = np.vectorize(_erf, otypes=[np.float64])


def _sigmoid(x: Array) -> Array:
    wide = x.astype(np.float64)  # exp of a large float32 would overflow where the quotient does not
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(wide, -700, 700))), x.dtype)


def _wide(fn: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """The function in float64, rounded once: tables made from it are then the same bytes on every machine."""
    return lambda x: np.asarray(fn(x.astype(np.float64)), x.dtype)


UNARY: Mapping[str, Callable[[Array], Array]] = {
    "neg": np.negative,
    "abs": np.abs,
    "exp": _wide(np.exp),
    "log": _wide(np.log),
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.asarray(1.0 / np.sqrt(x), x.dtype),
    "reciprocal": lambda x: np.asarray(1.0 / x, x.dtype),
    "square": np.square,
    "cos": _wide(np.cos),
    "sin": _wide(np.sin),
    "tanh": _wide(np.tanh),
    "erf": lambda x: _verf(x).astype(x.dtype),
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "relu": lambda x: np.maximum(x, 0),
    "softplus": lambda x: np.logaddexp(x, np.zeros((), x.dtype)),
    "floor": np.floor,
}
BINARY: Mapping[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "pow": np.power,
    "maximum": np.maximum,
    "minimum": np.minimum,
}
REDUCE: Mapping[str, Callable[[Array], Array]] = {
    "mean": lambda x: x.mean(axis=-1, keepdims=True, dtype=np.float64).astype(x.dtype),
    "sum": lambda x: x.sum(axis=-1, keepdims=True, dtype=np.float64).astype(x.dtype),
    "amax": lambda x: x.max(axis=-1, keepdims=True),
}
ACTS: Mapping[str, Callable[[Array], Array]] = {
    **{name: UNARY[name] for name in ("silu", "relu", "sigmoid", "tanh")},
    "gelu": lambda x: np.asarray(0.5 * x * (1 + _verf(x / np.sqrt(2))), x.dtype),
    "gelu_tanh": lambda x: np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))), x.dtype),
    "relu2": lambda x: np.square(np.maximum(x, 0)),
}


def unary(fn: Callable[[Array], Array]) -> Ref:
    """A reference from an elementwise function."""
    return lambda attrs, args, types: (np.asarray(fn(args[0]), args[0].dtype),)


def binary(fn: Callable[[Array, Array], Array]) -> Ref:
    """A reference from a two-argument function; the attribute `scalar` stands for the second (first if `reversed`)."""

    def ref(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
        if "scalar" not in attrs:
            return (np.asarray(fn(args[0], args[1])),)
        scalar = np.asarray(attrs["scalar"], args[0].dtype)
        pair = (scalar, args[0]) if attrs.get("reversed") else (args[0], scalar)
        return (np.asarray(fn(*pair), args[0].dtype),)

    return ref


def reduction(fn: Callable[[Array], Array]) -> Ref:
    """A reference from a reduction over the last axis that keeps it."""
    return lambda attrs, args, types: (fn(args[0]),)


def gelu(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    return (ACTS["gelu_tanh" if attrs["tanh"] else "gelu"](args[0]),)


def cast(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    return (args[0].astype(DTYPES[str(attrs["dtype"])]),)


def reshape(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    shape = attrs["shape"]
    assert isinstance(shape, tuple)
    return (args[0].reshape((len(args[0]), *shape[1:]) if shape and shape[0] == -1 else shape),)


def transpose(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    perm = attrs["perm"]
    assert isinstance(perm, tuple)
    return (np.ascontiguousarray(args[0].transpose(perm)),)


def slice_(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    index = [slice(None)] * args[0].ndim
    index[_int(attrs, "axis")] = slice(_int(attrs, "start"), _int(attrs, "stop"))
    return (args[0][tuple(index)],)


def concat(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    return (np.concatenate(args, axis=_int(attrs, "axis")),)


def copy(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    return (np.ascontiguousarray(args[0]),)


def take_rows(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    return (args[0][args[1]],)


def _logical(w: Array, t: TensorType) -> Array:
    """The weight in its logical shape, whatever its layout."""
    if t.layout in PACKED:
        return unpack(w, int(t.shape[0]), int(t.shape[1]), t.layout)
    return w


def embedding(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    return (_logical(args[0], types[0])[args[1]].astype(np.float32),)


def qembedding(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    codes, scales, ids = _logical(args[0], types[0]), args[1], args[2]
    return (SCHEMES[str(attrs["scheme"])].dequantize(codes[ids], scales[ids]),)


def linear(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    y = args[0] @ _logical(args[1], types[1]).astype(np.float32).T
    return (y + args[2] if attrs.get("bias") else y,)


def qlinear(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    w = SCHEMES[str(attrs["scheme"])].dequantize(_logical(args[1], types[1]), args[2])
    y = args[0] @ w.T
    return (y + args[3] if attrs.get("bias") else y,)


def _rms(x: Array, eps: float) -> Array:
    mean = np.square(x, dtype=np.float64).mean(axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(mean + eps), np.float32)


def rms_norm(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    y = _rms(args[0], _float(attrs, "eps"))
    return (y * args[1] if len(args) > 1 else y,)


def _layer_norm(attrs: Attrs, x: Array, params: Sequence[Array]) -> Array:
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    var = np.square(centred).mean(axis=-1, keepdims=True)
    y = np.asarray(centred / np.sqrt(var + _float(attrs, "eps")), np.float32)
    if len(params) > (1 if attrs.get("bias") else 0):
        y = y * params[0]
    return np.asarray(y + params[-1] if attrs.get("bias") else y)


def layer_norm(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """Inputs x, then the weight if any, then the bias when the attribute `bias` is set."""
    return (_layer_norm(attrs, args[0], args[1:]),)


def add_rms_norm(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    total = args[0] + args[1]
    return (*rms_norm(attrs, (total, *args[2:]), types), total)


def add_layer_norm(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    total = args[0] + args[1]
    return (_layer_norm(attrs, total, args[2:]), total)


def act_mul(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    return (ACTS[str(attrs["act"])](args[0]) * args[1],)


def rotary(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """Pairs (i, i + R/2), or (2i, 2i + 1) when `interleaved`: (a, b) -> (a cos - b sin, b cos + a sin)."""
    x, cos, sin, positions = args
    c, s = cos[positions][:, None], sin[positions][:, None]
    half = cos.shape[1]
    out = x.copy()
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if attrs["interleaved"]
        else (
            slice(0, half),
            slice(half, 2 * half),
        )
    )
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return (out,)


def _visible(attrs: Attrs, q_pos: Array, k_pos: Array) -> Array:
    """[queries, keys]: which keys a query sees."""
    q, k, w = q_pos[:, None], k_pos[None], _int(attrs, "window")
    seen = k <= q
    if attrs["kind"] == "sliding":
        seen &= k > q - w
    if attrs["kind"] == "chunked":
        seen &= k // w == q // w
    return np.asarray(seen)


def _attend(attrs: Attrs, q: Array, k: Array, v: Array, q_pos: Array, sinks: Array | None) -> Array:
    """q[T, Hq, D] over keys k[N, Hk, D] at positions 0..N-1, values v[N, Hk, Dv]."""
    group = q.shape[1] // k.shape[1]
    wide = np.einsum("thd,nhd->htn", q.astype(np.float64), np.repeat(k, group, axis=1).astype(np.float64))
    scores = wide * _float(attrs, "scale")
    cap = _float(attrs, "softcap")
    if cap:
        scores = cap * np.tanh(scores / cap)
    scores = np.where(_visible(attrs, q_pos, np.arange(len(k)))[None], scores, -np.inf)
    peak = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        peak = np.maximum(peak, sinks[:, None, None])
    p = np.exp(scores - peak)
    total = p.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - peak)
    out = np.einsum("htn,nhd->thd", p / total, np.repeat(v, group, axis=1).astype(np.float64))
    return out.astype(np.float32)


def attention(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """All tokens are one sequence in order; the mask goes by index."""
    q, k, v = args[:3]
    return (_attend(attrs, q, k, v, np.arange(len(q)), args[3] if attrs.get("sinks") else None),)


def _pages(attrs: Attrs, kv: Array) -> tuple[Array, Array]:
    """Writable views of one layer: K [P, heads, k_dim, block], V [P, heads, block, v_dim]."""
    heads, block = _int(attrs, "heads"), _int(attrs, "block")
    dtype = DTYPES[str(attrs["dtype"])]
    out = []
    for name, shape in (("k", (heads, _int(attrs, "k_dim"), block)), ("v", (heads, block, _int(attrs, "v_dim")))):
        start = _int(attrs, f"{name}_offset")
        size = int(np.prod(shape)) * dtype.itemsize
        out.append(kv[:, start : start + size].view(dtype).reshape(len(kv), *shape))
    return out[0], out[1]


def kv_append(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """Writes the step's keys and values into the cache at `slots`; the cache array itself changes."""
    k, v, slots, kv = args
    keys, values = _pages(attrs, kv)
    page, offset = np.divmod(slots, _int(attrs, "block"))
    keys[page, :, :, offset] = k
    values[page, :, offset] = v
    return ()


def paged_attention(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """Each sequence's queries over its cached keys, found through its row of the page table."""
    q, kv, table, start, positions = args[:5]
    keys, values = _pages(attrs, kv)
    out = np.zeros((*q.shape[:2], _int(attrs, "v_dim")), np.float32)
    for s in range(len(table)):
        rows = slice(int(start[s]), int(start[s + 1]))
        if rows.start == rows.stop:
            continue
        q_pos = positions[rows]
        n = int(q_pos.max()) + 1
        pages = table[s, : -(-n // _int(attrs, "block"))]
        k = keys[pages].astype(np.float32).transpose(0, 3, 1, 2).reshape(-1, *keys.shape[1:3])[:n]
        v = values[pages].astype(np.float32).transpose(0, 2, 1, 3).reshape(-1, values.shape[1], values.shape[3])[:n]
        out[rows] = _attend(attrs, q[rows], k, v, q_pos, args[5] if attrs.get("sinks") else None)
    return (out,)
