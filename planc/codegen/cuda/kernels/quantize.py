"""Rows rounded to 8 bits, in Triton: in go float vectors, out come their codes and a scale each.

A vector is scaled by its own largest magnitude; one of zeros has the scale 0.
"""

import triton
import triton.language as tl

from planc.codegen.cuda.kernels.elementwise import gated
from planc.codegen.cuda.kernels.norm import start_of

_HALVES_VANISH = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it drops what is below 1, to the nearest even


@triton.jit
def less(x, shift_ptr, column, WIDTH: tl.constexpr):
    """x at some columns of vectors, less the shift, if there is one."""
    if shift_ptr is not None:
        x -= tl.load(shift_ptr + column, mask=column < WIDTH, other=0.0)[None, :]
    return x


@triton.jit
def _ratio(x, divisor, LIMIT: tl.constexpr):
    """x in units of the scale of its vector."""
    ratio = tl.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape))
    return tl.minimum(tl.maximum(ratio, -LIMIT), LIMIT)


@triton.jit
def first_digits(
    x,
    vector,
    column,
    vectors,
    codes_ptr,
    scales_ptr,
    LIMIT: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDTH: tl.constexpr,
    OUTLIERS: tl.constexpr,
):
    """Writes codes and scales of whole vectors, 0 behind their end, and gives what they were divided by. Both are
    dense; there is room for second digits behind the codes.
    """
    scale = tl.div_rn(tl.max(tl.abs(x), axis=1), tl.full((x.shape[0],), LIMIT, tl.float32))
    tl.store(scales_ptr + vector, scale, mask=vector < vectors)
    divisor = tl.where(scale == 0.0, 1.0, scale)
    code = _ratio(x, divisor, LIMIT)
    if WHOLE:
        code = (code + _HALVES_VANISH) - _HALVES_VANISH
    out = vector.to(tl.int64)[:, None] * (WIDTH + 2 * OUTLIERS) + column[None, :]
    there = (vector < vectors)[:, None] & (column < WIDTH)[None, :]
    tl.store(codes_ptr + out, code.to(codes_ptr.dtype.element_ty), mask=there)
    return divisor


@triton.jit
def outliers_of(outliers_ptr, vector, vectors, OUTLIERS: tl.constexpr, PICKED: tl.constexpr):
    """The features that have a second digit, and where there are any."""
    place = tl.arange(0, PICKED)
    feature = tl.load(outliers_ptr + place, mask=place < OUTLIERS, other=0)
    return feature, (vector < vectors)[:, None] & (place < OUTLIERS)[None, :]


@triton.jit
def second_digits(
    x, divisor, vector, there, codes_ptr, LIMIT: tl.constexpr, WIDTH: tl.constexpr, OUTLIERS: tl.constexpr
):
    """Writes, of the outliers x[ROWS, PICKED], codes of what rounding took from them, and their own again behind."""
    ratio = _ratio(x, divisor, LIMIT)
    first = ratio.to(codes_ptr.dtype.element_ty)
    left = (ratio - first.to(tl.float32)).to(codes_ptr.dtype.element_ty)
    place = tl.arange(0, x.shape[1])
    out = vector.to(tl.int64)[:, None] * (WIDTH + 2 * OUTLIERS) + WIDTH + place[None, :]
    tl.store(codes_ptr + out, left, mask=there)
    tl.store(codes_ptr + out + OUTLIERS, first, mask=there)


@triton.jit
def quantize_rows(
    x_ptr,
    shift_ptr,
    outliers_ptr,
    codes_ptr,
    scales_ptr,
    vectors,
    LIMIT: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDTH: tl.constexpr,
    OUTLIERS: tl.constexpr,
    PICKED: tl.constexpr,
    EXTENT: tl.constexpr,
    INNER: tl.constexpr,
    X: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Codes up to LIMIT, integers if WHOLE, of vectors less the shift, if there is one; both outputs are dense. Behind
    a vector's codes stand, of its OUTLIERS, the codes of what rounding took from them, and their own again.
    """
    vector = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there = (vector < vectors)[:, None] & (column < WIDTH)[None, :]
    xs = x_ptr + start_of(vector, EXTENT, INNER, X)[:, None]
    x = less(tl.load(xs + column[None, :], mask=there, other=0.0).to(tl.float32), shift_ptr, column, WIDTH)
    divisor = first_digits(x, vector, column, vectors, codes_ptr, scales_ptr, LIMIT, WHOLE, WIDTH, OUTLIERS)
    if outliers_ptr is not None:
        feature, there = outliers_of(outliers_ptr, vector, vectors, OUTLIERS, PICKED)
        x = less(tl.load(xs + feature[None, :], mask=there, other=0.0).to(tl.float32), shift_ptr, feature, WIDTH)
        second_digits(x, divisor, vector, there, codes_ptr, LIMIT, WIDTH, OUTLIERS)


@triton.jit
def rotate(
    x_ptr,
    up_ptr,
    shift_ptr,
    turned_ptr,
    ACT: tl.constexpr,
    SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    COUNT: tl.constexpr,
    SCALE: tl.constexpr,
    WORDS: tl.constexpr,
    EXTENT: tl.constexpr,
    INNER: tl.constexpr,
    X: tl.constexpr,
    UP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Vectors, or where there is another, act(x) * up, less the shift, if there is one, times a Hadamard matrix, dense:
    features COUNT apart form a block of SIZE = 2^STAGES; the bits of WORDS say which of them are negated first. The
    reference's order of additions.
    """
    vector = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    feature = tl.arange(0, SIZE)
    at = feature[:, None] * COUNT + column[None, :]
    there = (column < COUNT)[None, :] & (feature >= 0)[:, None]
    xs = x_ptr + start_of(vector, EXTENT, INNER, X) + at
    if up_ptr is not None:
        x = gated(xs, up_ptr + start_of(vector, EXTENT, INNER, UP) + at, there, ACT)
    else:
        x = tl.load(xs, mask=there, other=0.0).to(tl.float32)
    if shift_ptr is not None:
        x -= tl.load(shift_ptr + at, mask=there, other=0.0)
    word = tl.full((SIZE,), WORDS[0], tl.int32)
    for i in tl.static_range(1, len(WORDS)):
        word = tl.where(feature // 32 == i, WORDS[i], word)
    x *= (1 - 2 * ((word >> (feature % 32)) & 1)).to(tl.float32)[:, None]
    for stage in tl.static_range(STAGES):  # partners lie SIZE >> stage + 1 apart
        pairs = tl.permute(tl.reshape(x, (1 << stage, 2, (SIZE >> (stage + 1)) * COLUMNS)), (0, 2, 1))
        a, b = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (SIZE, COLUMNS))
    width: tl.constexpr = SIZE * COUNT
    tl.store(turned_ptr + vector.to(tl.int64) * width + at, x * SCALE, mask=there)
