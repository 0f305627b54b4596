"""Numpy references of the op table: in go attributes, arrays and types, out come arrays. Plain, float32, never fast."""

from collections.abc import Callable, Mapping, Sequence
from math import erf as _erf

import numpy as np

from planc.compiler.ir.packing import unpack
from planc.compiler.ir.types import DTYPES, PACKED, Attr, TensorType

Array = np.ndarray
Attrs = Mapping[str, Attr]
Types = Sequence[TensorType]
Out = tuple[Array, ...]
Ref = Callable[[Attrs, Sequence[Array], Types], Out]


def as_int(attrs: Attrs, name: str) -> int:
    value = attrs[name]
    assert isinstance(value, int)
    return value


def as_float(attrs: Attrs, name: str) -> float:
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
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": np.rint,
    "sign": lambda x: np.asarray((x > 0).astype(x.dtype) - (x < 0).astype(x.dtype), x.dtype),  # 0 for a NaN
    "expm1": _wide(np.expm1),
    "log1p": _wide(np.log1p),
}
BINARY: Mapping[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "pow": np.power,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "remainder": np.remainder,
    "floor_divide": np.floor_divide,
}
COMPARE: Mapping[str, Callable[[Array, Array], Array]] = {
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
REDUCE: Mapping[str, Callable[[Array], Array]] = {
    "mean": lambda x: x.mean(axis=-1, keepdims=True, dtype=np.float64).astype(x.dtype),
    "sum": lambda x: x.sum(axis=-1, keepdims=True, dtype=np.float64).astype(x.dtype),
    "amax": lambda x: x.max(axis=-1, keepdims=True),
    "amin": lambda x: x.min(axis=-1, keepdims=True),
    "prod": lambda x: x.prod(axis=-1, keepdims=True, dtype=np.float64).astype(x.dtype),
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
        pair = list(args)
        if "scalar" in attrs:
            pair.append(np.asarray(attrs["scalar"], args[0].dtype))
        with np.errstate(all="ignore"):
            return (np.asarray(fn(*(pair[::-1] if attrs.get("reversed") else pair)), args[0].dtype),)

    return ref


def compare(fn: Callable[[Array, Array], Array]) -> Ref:
    """A reference from a comparison: 1.0 where it holds, 0.0 elsewhere. A scalar meets integers as it is."""

    def ref(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
        pair = list(args)
        if "scalar" in attrs:
            pair.append(np.asarray(attrs["scalar"], args[0].dtype if args[0].dtype.kind == "f" else np.float64))
        return (fn(*(pair[::-1] if attrs.get("reversed") else pair)).astype(np.float32),)

    return ref


def where(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """c != 0 ? a : b; a NaN is not 0."""
    return (np.where(args[0] != 0, args[1], args[2]),)


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
    index[as_int(attrs, "axis")] = slice(as_int(attrs, "start"), as_int(attrs, "stop"))
    return (args[0][tuple(index)],)


def concat(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    return (np.concatenate(args, axis=as_int(attrs, "axis")),)


def copy(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    return (np.ascontiguousarray(args[0]),)


def take_rows(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    return (args[0][args[1]],)


def expand(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """Axes of size 1 repeat. With `rows`, the interpreter says by `length` how many rows the step has."""
    shape, x = attrs["shape"], args[0]
    assert isinstance(shape, tuple)
    rows = (int(attrs.get("length", 1)) if "rows" in attrs else len(x),) if shape[0] == -1 else shape[:1]  # type: ignore[arg-type]
    return (np.ascontiguousarray(np.broadcast_to(x, (*rows, *shape[1:]))),)


def logical(w: Array, t: TensorType) -> Array:
    """The weight in its logical shape, whatever its layout."""
    if t.layout in PACKED:
        return unpack(w, tuple(int(d) for d in t.shape), t.layout)
    return w


def embedding(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    return (logical(args[0], types[0])[args[1]].astype(np.float32),)


def linear(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    y = args[0].astype(np.float32) @ logical(args[1], types[1]).astype(np.float32).T
    return (y + args[2] if attrs.get("bias") else y,)


def _rms(x: Array, eps: float) -> Array:
    mean = np.square(x, dtype=np.float64).mean(axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(mean + eps), np.float32)


def rms_norm(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    y = _rms(args[0], as_float(attrs, "eps"))
    return (y * args[1] if len(args) > 1 else y,)


def _layer_norm(attrs: Attrs, x: Array, params: Sequence[Array]) -> Array:
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    var = np.square(centred).mean(axis=-1, keepdims=True)
    y = np.asarray(centred / np.sqrt(var + as_float(attrs, "eps")), np.float32)
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
