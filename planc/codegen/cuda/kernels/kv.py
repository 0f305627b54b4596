"""Writing the paged cache, in Triton: in go a step's keys and values, their places are written.

Before, queries and keys turn by their positions: pairs of features (i, i + HALF), or neighbours when INTERLEAVED.

A page holds, for each layer, K [heads, k_dim, BLOCK] and V [heads, BLOCK, v_dim], and where codes have scales, one of
f32 [heads, BLOCK] for each. `PAGE` is the size of a page in elements of the cache, `SCALES` in elements of f32.
"""

import triton
import triton.language as tl


@triton.jit
def _codes(x, LIMIT: tl.constexpr, WHOLE: tl.constexpr):
    """Numbers up to LIMIT and the scale of a vector. One that is not finite has the scale NaN and codes of 0."""
    top = tl.max(tl.abs(x), axis=0)
    broken = tl.sum(x * 0.0, axis=0) != 0.0  # NaN, where a maximum would drop it
    scale = tl.div_rn(top, LIMIT)
    ratio = tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale))
    ratio = tl.minimum(tl.maximum(ratio, -LIMIT), LIMIT)
    if WHOLE:
        ratio = (ratio + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest whole number, halves to the even one
    return tl.where(broken, 0.0, ratio), tl.where(broken, float("nan"), scale)


@triton.jit
def _written(
    k,
    v,
    slot,
    head,
    k_pages_ptr,
    v_pages_ptr,
    k_scales_ptr,
    v_scales_ptr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    SCALES: tl.constexpr,
    LIMIT: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """A head's key f32[K_PAD] and value f32[V_PAD] to their slot."""
    page, inside = (slot // BLOCK).to(tl.int64), slot % BLOCK
    i, j = tl.arange(0, K_PAD), tl.arange(0, V_PAD)
    if LIMIT > 0.0:
        k, k_scale = _codes(k, LIMIT, WHOLE)
        v, v_scale = _codes(v, LIMIT, WHOLE)
        at = page * SCALES + head * BLOCK + inside
        tl.store(k_scales_ptr + at, k_scale)
        tl.store(v_scales_ptr + at, v_scale)
    k_at = page * PAGE + (head * K_DIM + i) * BLOCK + inside
    v_at = page * PAGE + (head * BLOCK + inside) * V_DIM + j
    tl.store(k_pages_ptr + k_at, k.to(k_pages_ptr.dtype.element_ty), mask=i < K_DIM)
    tl.store(v_pages_ptr + v_at, v.to(v_pages_ptr.dtype.element_ty), mask=j < V_DIM)


@triton.jit
def _turned(x_ptr, i, cos_ptr, sin_ptr, WIDTH: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Features i of a vector [WIDTH] that turns by these angles [HALF]; zeros from WIDTH on."""
    if INTERLEAVED:
        pair, other, first = i // 2, i ^ 1, i % 2 == 0
    else:
        first = i < HALF
        pair, other = tl.where(first, i, i - HALF), tl.where(first, i + HALF, i - HALF)
    turns = i < 2 * HALF
    x = tl.load(x_ptr + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + other, mask=turns, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + pair, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + pair, mask=turns, other=0.0).to(tl.float32)
    return x * cos + tl.where(first, -y, y) * sin


@triton.jit
def _turn_heads(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    token,
    head,
    x_row,
    x_head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """(a, b) -> (a cos - b sin, b cos + a sin) for the HALF pairs of each head; features past them stay as they are."""
    pair = tl.arange(0, PAIRS)
    cos = tl.load(cos_ptr + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    first = 2 * pair if INTERLEAVED else pair
    second = first + (1 if INTERLEAVED else HALF)
    there = (head < HEADS)[:, None] & (pair < HALF)[None, :]
    from_ = x_ptr + token * x_row + head[:, None] * x_head
    to = y_ptr + (token * HEADS + head)[:, None] * WIDTH
    a = tl.load(from_ + first[None, :], mask=there, other=0.0).to(tl.float32)
    b = tl.load(from_ + second[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(to + first[None, :], (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=there)
    tl.store(to + second[None, :], (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=there)
    if REST > 0:
        column = 2 * HALF + tl.arange(0, REST)
        more = (head < HEADS)[:, None] & (column < WIDTH)[None, :]
        kept = tl.load(from_ + column[None, :], mask=more, other=0.0).to(tl.float32)
        tl.store(to + column[None, :], kept.to(y_ptr.dtype.element_ty), mask=more)


@triton.jit
def rotary(
    x_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    y_ptr,
    x_row,
    x_head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LINES: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """A program turns LINES heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * LINES + tl.arange(0, LINES)
    angle = tl.load(positions_ptr + token).to(tl.int64) * HALF
    _turn_heads(
        x_ptr, cos_ptr + angle, sin_ptr + angle, y_ptr, token, head, x_row, x_head,
        HEADS, WIDTH, HALF, INTERLEAVED, PAIRS, REST,
    )  # fmt: skip


@triton.jit
def append(
    k_ptr,
    v_ptr,
    slots_ptr,
    k_pages_ptr,
    v_pages_ptr,
    k_scales_ptr,
    v_scales_ptr,
    K_ROW: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_ROW: tl.constexpr,
    V_HEAD: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    SCALES: tl.constexpr,
    LIMIT: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One token and head a program. A token whose slot is negative is padding, and writes nothing."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        i, j = tl.arange(0, K_PAD), tl.arange(0, V_PAD)
        k = tl.load(k_ptr + token * K_ROW + head * K_HEAD + i, mask=i < K_DIM, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + token * V_ROW + head * V_HEAD + j, mask=j < V_DIM, other=0.0).to(tl.float32)
        _written(
            k, v, slot, head, k_pages_ptr, v_pages_ptr, k_scales_ptr, v_scales_ptr,
            K_DIM, V_DIM, K_PAD, V_PAD, BLOCK, PAGE, SCALES, LIMIT, WHOLE,
        )  # fmt: skip


@triton.jit
def rotary_append(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    k_pages_ptr,
    v_pages_ptr,
    k_scales_ptr,
    v_scales_ptr,
    y_ptr,
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    K_ROW: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_ROW: tl.constexpr,
    V_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LINES: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    SCALES: tl.constexpr,
    LIMIT: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The first KV_HEADS programs of a token turn and write a key, and write its value; others turn LINES queries."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angle = tl.load(positions_ptr + token).to(tl.int64) * HALF
    if head < KV_HEADS:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            i, j = tl.arange(0, K_PAD), tl.arange(0, V_PAD)
            k_from = k_ptr + token * K_ROW + head * K_HEAD
            k = _turned(k_from, i, cos_ptr + angle, sin_ptr + angle, K_DIM, HALF, INTERLEAVED)
            v = tl.load(v_ptr + token * V_ROW + head * V_HEAD + j, mask=j < V_DIM, other=0.0).to(tl.float32)
            _written(
                k, v, slot, head, k_pages_ptr, v_pages_ptr, k_scales_ptr, v_scales_ptr,
                K_DIM, V_DIM, K_PAD, V_PAD, BLOCK, PAGE, SCALES, LIMIT, WHOLE,
            )  # fmt: skip
    else:
        line = (head - KV_HEADS) * LINES + tl.arange(0, LINES)
        _turn_heads(
            q_ptr, cos_ptr + angle, sin_ptr + angle, y_ptr, token, line, Q_ROW, Q_HEAD,
            HEADS, K_DIM, HALF, INTERLEAVED, PAIRS, REST,
        )  # fmt: skip
