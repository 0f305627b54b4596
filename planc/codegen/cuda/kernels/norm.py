"""Norms of vectors along the last axis, in Triton: in go x (and what is added to it), out come the normed and the sum.

One program takes ROWS vectors, each whole in registers: the tree of additions depends on the width alone.
"""

import triton
import triton.language as tl


@triton.jit
def start_of(vector, EXTENT: tl.constexpr, INNER: tl.constexpr, STRIDE: tl.constexpr):
    """Offset of a vector: STRIDE is that of a row, then of each axis of EXTENT, whose product is INNER."""
    at = (vector // INNER).to(tl.int64) * STRIDE[0]
    rest = vector % INNER
    for axis in tl.static_range(len(EXTENT) - 1, -1, -1):
        if EXTENT[axis] > 1:
            at += (rest % EXTENT[axis]).to(tl.int64) * STRIDE[axis + 1]
            rest = rest // EXTENT[axis]
    return at


@triton.jit
def summed(
    x_ptr,
    added_ptr,
    vector,
    column,
    there,
    EXTENT: tl.constexpr,
    INNER: tl.constexpr,
    X: tl.constexpr,
    ADDED: tl.constexpr,
):
    """x (+ added) at some columns of vectors, in float32."""
    x = tl.load(x_ptr + start_of(vector, EXTENT, INNER, X)[:, None] + column[None, :], mask=there, other=0.0).to(
        tl.float32
    )
    if added_ptr is not None:
        added = added_ptr + start_of(vector, EXTENT, INNER, ADDED)[:, None] + column[None, :]
        x += tl.load(added, mask=there, other=0.0).to(tl.float32)
    return x


@triton.jit
def statistics(x, inside, LAYER: tl.constexpr, EPS: tl.constexpr, WIDTH: tl.constexpr):
    """The mean of each whole vector where LAYER, else 0, and what it is then to be multiplied by."""
    mean = tl.zeros((x.shape[0],), tl.float32)
    if LAYER:
        mean = tl.sum(x, axis=1) / WIDTH
        x = tl.where(inside, x - mean[:, None], 0.0)
    square = tl.sum(x * x, axis=1) / WIDTH
    return mean, 1.0 / tl.sqrt_rn(square + EPS)


@triton.jit
def normed(x, mean, factor, weight_ptr, bias_ptr, column, LAYER: tl.constexpr, WIDTH: tl.constexpr):
    """x at some columns, by the statistics of its vectors and the parameters."""
    if LAYER:
        x = x - mean[:, None]
    y = x * factor[:, None]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def norm(
    x_ptr,
    added_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    vectors,
    LAYER: tl.constexpr,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    EXTENT: tl.constexpr,
    INNER: tl.constexpr,
    X: tl.constexpr,
    ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """RMS norm, or with LAYER the layer norm, of x (+ added); outputs are dense."""
    vector = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (column < WIDTH)[None, :]
    there = (vector < vectors)[:, None] & inside
    x = summed(x_ptr, added_ptr, vector, column, there, EXTENT, INNER, X, ADDED)
    out = vector.to(tl.int64)[:, None] * WIDTH + column[None, :]
    if sum_ptr is not None:
        tl.store(sum_ptr + out, x.to(sum_ptr.dtype.element_ty), mask=there)
    mean, factor = statistics(x, inside, LAYER, EPS, WIDTH)
    y = normed(x, mean, factor, weight_ptr, bias_ptr, column, LAYER, WIDTH)
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=there)
