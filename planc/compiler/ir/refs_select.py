"""Numpy references of ops that order or pick along the last axis: softmax, cumsum, argmax, topk, gather, scatter."""

from collections.abc import Sequence

import numpy as np

from planc.compiler.ir.refs import Array, Attrs, Out, Types, as_float, as_int


def softmax(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """A row of -inf alone gives NaN, as the quotient says."""
    wide = args[0].astype(np.float64)
    with np.errstate(invalid="ignore"):
        p = np.exp(wide - wide.max(axis=-1, keepdims=True))
    return ((p / p.sum(axis=-1, keepdims=True)).astype(args[0].dtype),)


def cumsum(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    return (args[0].cumsum(axis=-1, dtype=np.float64).astype(args[0].dtype),)


def argmax(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """The first of equals; a NaN is the largest."""
    return (args[0].argmax(axis=-1, keepdims=True).astype(np.int32),)


def topk(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """Best first, of equals the lowest index first; a NaN is larger than every number."""
    x = args[0]
    nan, number = np.isnan(x), np.nan_to_num(x, nan=0.0, posinf=np.inf, neginf=-np.inf)
    keys = (-number, ~nan) if attrs["largest"] else (number, nan)
    index = np.lexsort(keys, axis=-1)[..., : as_int(attrs, "k")]
    return np.take_along_axis(x, index, -1), index.astype(np.int32)


def _spread(*arrays: Array) -> list[Array]:
    """The arrays with every axis but the last broadcast to one shape."""
    lead = np.broadcast_shapes(*(a.shape[:-1] for a in arrays))
    return [np.broadcast_to(a, (*lead, a.shape[-1])) for a in arrays]


def gather(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """y[.., j] = x[.., i[.., j]]; an index outside of the axis gives 0."""
    x, index = _spread(*args)
    inside = (index >= 0) & (index < x.shape[-1])
    picked = np.take_along_axis(x, np.where(inside, index, 0), -1)
    return (np.where(inside, picked, np.zeros((), x.dtype)),)


def scatter(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """A copy of x with x[.., i[.., j]] = (or +=) src[.., j], j ascending; an index outside writes nothing."""
    src = args[2] if len(args) > 2 else np.full((1,), as_float(attrs, "scalar"), args[0].dtype)
    x, index, src = _spread(args[0], args[1], src)
    src = np.broadcast_to(src, index.shape)
    out = x.copy()
    for row in np.ndindex(*index.shape[:-1]):
        for j, i in enumerate(index[row]):
            if 0 <= i < out.shape[-1]:
                out[row][i] = out[row][i] + src[row][j] if attrs.get("add") else src[row][j]
    return (out,)
