"""Numpy references of products of two activations and of experts: matmul, expert_linear, weighted_sum."""

from collections.abc import Sequence

import numpy as np

from planc.compiler.ir.refs import Array, Attrs, Out, Types, logical


def matmul(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    return (np.matmul(args[0], args[1]),)


def expert_linear(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """y[t, j] = x[t, (j)] @ w[ids[t, j]].T (+ b[ids[t, j]]); an id outside of the experts gives zeros."""
    w = logical(args[2], types[2]).astype(np.float32)
    return (choose(args[0].astype(np.float32), args[1], w, args[3] if attrs.get("bias") else None),)


def choose(x: Array, ids: Array, w: Array, bias: Array | None) -> Array:
    """Each row's products with the weights of its experts."""
    slots = np.broadcast_to(ids, (len(x), ids.shape[-1]))
    rows = np.broadcast_to(x if x.ndim == 3 else x[:, None], (*slots.shape, x.shape[-1]))
    out = np.zeros((*slots.shape, w.shape[1]), x.dtype)
    for e in range(len(w)):
        mine = slots == e
        out[mine] = rows[mine] @ w[e].T + (0 if bias is None else bias[e])
    return out


def weighted_sum(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    return (np.einsum("tkn,tk->tn", *args),)
