"""Ops over the ranks of a plan: type rules see one rank's input, references take the arrays of all ranks in order.

all_reduce: y = x[0] + x[1] + ..    in this order on every rank, so that all hold the same bits
all_gather: y[.., starts[r] : starts[r] + n] = x[r]    parts that overlap hold equal values
"""

from collections.abc import Sequence

import numpy as np

from planc.compiler.ir.infer import as_int, as_ints, want
from planc.compiler.ir.refs import Array, Attrs, Out, Types
from planc.compiler.ir.types import TensorType


def reduce_type(attrs: Attrs, types: Types) -> tuple[TensorType, ...]:
    """f32 of any shape gives the sum over the ranks."""
    _one_type(attrs, types)
    return (TensorType("f32", types[0].shape),)


def gather_type(attrs: Attrs, types: Types) -> tuple[TensorType, ...]:
    """f32[.., n] gives f32[.., size]: rank r has the n that begin at `starts[r]`."""
    _one_type(attrs, types)
    starts, size, n = as_ints(attrs["starts"]), as_int(attrs["size"]), int(types[0].shape[-1])
    want(len(starts) == attrs["ranks"], f"all_gather: {len(starts)} starts for {attrs['ranks']} ranks")
    at = 0
    for start in sorted(starts):
        want(0 <= start <= at, f"all_gather: parts of {n} at {starts} leave a gap before {start}")
        at = max(at, start + n)
    want(at == size, f"all_gather: parts of {n} at {starts} end at {at}, not {size}")
    return (TensorType("f32", (*types[0].shape[:-1], size)),)


def _one_type(attrs: Attrs, types: Types) -> None:
    ranks = as_int(attrs["ranks"])
    want(ranks > 1, f"a collective joins two ranks or more, got {ranks}")
    want(len(types) in (1, ranks), f"a collective takes one input, or in its reference those of {ranks} ranks")
    want(all((t.dtype, t.shape) == ("f32", types[0].shape) for t in types), f"a collective takes f32, got {types[0]}")


def all_reduce(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    total = args[0].copy()
    for other in args[1:]:
        total += other
    return (total,)


def all_gather(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    out = np.empty((*args[0].shape[:-1], as_int(attrs["size"])), args[0].dtype)
    for start, mine in zip(as_ints(attrs["starts"]), args, strict=True):
        out[..., start : start + mine.shape[-1]] = mine
    return (out,)
