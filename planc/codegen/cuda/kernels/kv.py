"""Writing the paged cache, in Triton: in go a step's keys and values, their places are written.

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
        page, inside = (slot // BLOCK).to(tl.int64), slot % BLOCK
        i, j = tl.arange(0, K_PAD), tl.arange(0, V_PAD)
        k = tl.load(k_ptr + token * K_ROW + head * K_HEAD + i, mask=i < K_DIM, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + token * V_ROW + head * V_HEAD + j, mask=j < V_DIM, other=0.0).to(tl.float32)
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
