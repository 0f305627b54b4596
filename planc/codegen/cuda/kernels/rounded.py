"""Norms and gated activations whose rows are rounded to 8 bits as they are made, in Triton.

A program holds whole vectors. What it makes of outliers, whose second digits follow, it makes once more from memory.
"""

import triton
import triton.language as tl

from planc.codegen.cuda.kernels.elementwise import gated
from planc.codegen.cuda.kernels.norm import normed, start_of, statistics, summed
from planc.codegen.cuda.kernels.quantize import first_digits, less, outliers_of, second_digits


@triton.jit
def norm_quantize(
    x_ptr,
    added_ptr,
    weight_ptr,
    bias_ptr,
    shift_ptr,
    outliers_ptr,
    sum_ptr,
    codes_ptr,
    scales_ptr,
    vectors,
    LAYER: tl.constexpr,
    EPS: tl.constexpr,
    LIMIT: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDTH: tl.constexpr,
    OUTLIERS: tl.constexpr,
    PICKED: tl.constexpr,
    EXTENT: tl.constexpr,
    INNER: tl.constexpr,
    X: tl.constexpr,
    ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`norm`, then `quantize_rows`."""
    vector = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (column < WIDTH)[None, :]
    there = (vector < vectors)[:, None] & inside
    x = summed(x_ptr, added_ptr, vector, column, there, EXTENT, INNER, X, ADDED)
    if sum_ptr is not None:
        out = vector.to(tl.int64)[:, None] * WIDTH + column[None, :]
        tl.store(sum_ptr + out, x.to(sum_ptr.dtype.element_ty), mask=there)
    mean, factor = statistics(x, inside, LAYER, EPS, WIDTH)
    y = less(normed(x, mean, factor, weight_ptr, bias_ptr, column, LAYER, WIDTH), shift_ptr, column, WIDTH)
    y = tl.where(inside, y, 0.0)
    divisor = first_digits(y, vector, column, vectors, codes_ptr, scales_ptr, LIMIT, WHOLE, WIDTH, OUTLIERS)
    if outliers_ptr is not None:
        feature, there = outliers_of(outliers_ptr, vector, vectors, OUTLIERS, PICKED)
        x = summed(x_ptr, added_ptr, vector, feature, there, EXTENT, INNER, X, ADDED)
        y = less(normed(x, mean, factor, weight_ptr, bias_ptr, feature, LAYER, WIDTH), shift_ptr, feature, WIDTH)
        second_digits(y, divisor, vector, there, codes_ptr, LIMIT, WIDTH, OUTLIERS)


@triton.jit
def act_mul_quantize(
    gate_ptr,
    up_ptr,
    shift_ptr,
    outliers_ptr,
    codes_ptr,
    scales_ptr,
    vectors,
    ACT: tl.constexpr,
    LIMIT: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDTH: tl.constexpr,
    OUTLIERS: tl.constexpr,
    PICKED: tl.constexpr,
    EXTENT: tl.constexpr,
    INNER: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """act(gate) * up, then `quantize_rows`."""
    vector = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there = (vector < vectors)[:, None] & (column < WIDTH)[None, :]
    gates = gate_ptr + start_of(vector, EXTENT, INNER, GATE)[:, None]
    ups = up_ptr + start_of(vector, EXTENT, INNER, UP)[:, None]
    x = less(gated(gates + column[None, :], ups + column[None, :], there, ACT), shift_ptr, column, WIDTH)
    divisor = first_digits(x, vector, column, vectors, codes_ptr, scales_ptr, LIMIT, WHOLE, WIDTH, OUTLIERS)
    if outliers_ptr is not None:
        feature, there = outliers_of(outliers_ptr, vector, vectors, OUTLIERS, PICKED)
        x = less(gated(gates + feature[None, :], ups + feature[None, :], there, ACT), shift_ptr, feature, WIDTH)
        second_digits(x, divisor, vector, there, codes_ptr, LIMIT, WIDTH, OUTLIERS)
