"""Products with weights, in Triton: in go rows of x and a weight [N, K], out come rows of x @ weight.T (+ bias).

One program makes a tile of BM rows by BN channels and walks K in steps of BK, so that the order of additions of an
output element depends on the weight's shape alone. With EXPERTS, rows are slots that `experts.place` put in order: each
tile has one expert, whose weight it takes.

`linear` has weights that are floats, `linear_codes` multiplies codes of 8 bits by codes of 8 bits, `linear_widened`
widens codes to bf16 and takes channels as the rows of its products: codes then go to the tensor cores from registers.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(rows, n, BM: tl.constexpr, BN: tl.constexpr, BAND: tl.constexpr):
    """The program's place among the tiles: bands of BAND tiles of rows share weights in the L2 cache."""
    pid = tl.program_id(0)
    across = tl.cdiv(n, BN)
    band = pid // (BAND * across)
    high = tl.minimum(tl.cdiv(rows, BM) - band * BAND, BAND)
    at = pid % (BAND * across)
    return band * BAND + at % high, at // high


@triton.jit
def _rows(slots_ptr, rows, tile, EXPERTS: tl.constexpr, BM: tl.constexpr):
    """Rows of the output that a tile makes, and which of them there are."""
    at = tile * BM + tl.arange(0, BM)
    if EXPERTS > 0:
        slot = tl.load(slots_ptr + at)
        return tl.maximum(slot, 0), slot >= 0
    else:
        return at, at < rows


@triton.jit
def _channels(tile, n, BN: tl.constexpr, EVEN_N: tl.constexpr):
    """Channels of a tile, and where their weights are read: past the last one it is read again."""
    at = tile * BN + tl.arange(0, BN)
    if EVEN_N:
        return at, at
    else:
        return at, tl.where(at < n, at, 0)


@triton.jit
def _add_bias(acc, bias_ptr, at, channel, SWAPPED: tl.constexpr):
    bias = tl.load(bias_ptr + at + channel).to(tl.float32)
    if SWAPPED:
        return acc + bias[:, None]
    else:
        return acc + bias[None, :]


@triton.jit
def linear(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    experts_ptr,
    slots_ptr,
    rows,
    n,
    k,
    x_row,
    x_slot,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
):
    """y[r, n] = sum over k of x[r, k] w[n, k]; x is rounded to bf16 where w is bf16."""
    tile, across = _tile(rows, n, BM, BN, BAND)
    expert = 0
    depth = k
    if EXPERTS > 0:
        expert = tl.load(experts_ptr + tile)
        if expert < 0:
            return
        depth = tl.where(expert < EXPERTS, k, 0)
    slot, there = _rows(slots_ptr, rows, tile, EXPERTS, BM)
    channel, from_channel = _channels(across, n, BN, EVEN_N)
    ks = tl.arange(0, BK)
    x_at = (slot // SLOTS).to(tl.int64) * x_row + (slot % SLOTS).to(tl.int64) * x_slot
    xs = x_ptr + x_at[:, None] + ks[None, :]
    ws = w_ptr + (expert.to(tl.int64) * n + from_channel.to(tl.int64))[None, :] * k + ks[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, depth, BK):
        if EVEN_K:
            x = tl.load(xs, mask=there[:, None], other=0.0)
            w = tl.load(ws)
        else:
            inside = ks < k - start
            x = tl.load(xs, mask=there[:, None] & inside[None, :], other=0.0)
            w = tl.load(ws, mask=inside[:, None], other=0.0)
        acc = tl.dot(x.to(w.dtype), w, acc, input_precision="ieee")
        xs += BK
        ws += BK
    if bias_ptr is not None and depth > 0:
        acc = _add_bias(acc, bias_ptr, expert.to(tl.int64) * n, from_channel, False)
    ys = y_ptr + slot.to(tl.int64)[:, None] * n + channel[None, :]
    tl.store(ys, acc.to(y_ptr.dtype.element_ty), mask=there[:, None] & (channel < n)[None, :])


@triton.jit
def linear_codes(
    x_ptr,
    row_scales_ptr,
    w_ptr,
    scales_ptr,
    bias_ptr,
    y_ptr,
    experts_ptr,
    slots_ptr,
    rows,
    n,
    k,
    x_row,
    x_slot,
    scale_row,
    scale_slot,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
):
    """Products of codes of 8 bits, times the scale of the row and that of the channel (GROUP 0) or of its group.

    Integers (EXACT) are added up in 32 bits. Products of fp8 lose bits in the tensor core's own sums, so that each
    step's sum is added in float32.
    """
    tile, across = _tile(rows, n, BM, BN, BAND)
    expert = 0
    depth = k
    if EXPERTS > 0:
        expert = tl.load(experts_ptr + tile)
        if expert < 0:
            return
        depth = tl.where(expert < EXPERTS, k, 0)
    slot, there = _rows(slots_ptr, rows, tile, EXPERTS, BM)
    channel, from_channel = _channels(across, n, BN, EVEN_N)
    first = expert.to(tl.int64) * n
    ks = tl.arange(0, BK)
    x_at = (slot // SLOTS).to(tl.int64) * x_row + (slot % SLOTS).to(tl.int64) * x_slot
    xs = x_ptr + x_at[:, None] + ks[None, :]
    ws = w_ptr + (first + from_channel.to(tl.int64))[None, :] * k + ks[:, None]
    ss = scales_ptr + first + from_channel
    if GROUP > 0:
        ss = scales_ptr + first * tl.cdiv(k, GROUP) + from_channel
    elif depth > 0:
        scale = tl.load(ss)
    else:
        scale = tl.zeros((BN,), tl.float32)
    acc = tl.zeros((BM, BN), tl.int32 if EXACT else tl.float32)
    for start in range(0, depth, BK):
        if EVEN_K:
            x = tl.load(xs, mask=there[:, None], other=0.0)
            w = tl.load(ws)
        else:
            inside = ks < k - start
            x = tl.load(xs, mask=there[:, None] & inside[None, :], other=0.0)
            w = tl.load(ws, mask=inside[:, None], other=0.0)
        if EXACT:
            acc = tl.dot(x, w, acc)
        else:
            if GROUP > 0:
                scale = tl.load(ss + start // GROUP * n)
            acc += tl.dot(x, w) * scale[None, :]
        xs += BK
        ws += BK
    y = acc.to(tl.float32)
    if EXACT:
        y = y * scale[None, :]
    scale_at = (slot // SLOTS).to(tl.int64) * scale_row + (slot % SLOTS).to(tl.int64) * scale_slot
    y = y * tl.load(row_scales_ptr + scale_at, mask=there, other=0.0)[:, None]
    if bias_ptr is not None and depth > 0:
        y = _add_bias(y, bias_ptr, first, from_channel, False)
    ys = y_ptr + slot.to(tl.int64)[:, None] * n + channel[None, :]
    tl.store(ys, y.to(y_ptr.dtype.element_ty), mask=there[:, None] & (channel < n)[None, :])


@triton.jit
def _halves(q, BN: tl.constexpr, BK: tl.constexpr):
    """Codes [BN, BK] of bytes that hold two, the even one low."""
    wide = q.to(tl.int32)
    return tl.reshape(tl.join(wide & 15, wide >> 4), (BN, BK))


@triton.jit
def _e2m1_doubled(code):
    """Twice the value of a float of 4 bits: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives."""
    exponent = (code >> 1) & 3
    fraction = code & 1
    size = tl.where(exponent == 0, fraction, ((2 + fraction) << exponent) >> 1)
    return tl.where(code > 7, -size, size)


@triton.jit
def linear_widened(
    x_ptr,
    w_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    y_ptr,
    experts_ptr,
    slots_ptr,
    rows,
    n,
    k,
    x_row,
    x_slot,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    FORMAT: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
):
    """x in bf16 by codes widened to bf16, which holds each of them exactly.

    FORMAT is `i8`, `u4` (code less OFFSET or the group's zero point) or `e2m1`. Scales belong to a channel (GROUP 0),
    or to a group of at least BK, which scales a step's sum. Scales of `e2m1` are powers of two for 32 neighbours and
    scale the widened codes, exactly.
    """
    tile, across = _tile(rows, n, BM, BN, BAND)
    expert = 0
    depth = k
    if EXPERTS > 0:
        expert = tl.load(experts_ptr + tile)
        if expert < 0:
            return
        depth = tl.where(expert < EXPERTS, k, 0)
    slot, there = _rows(slots_ptr, rows, tile, EXPERTS, BM)
    channel, from_channel = _channels(across, n, BN, EVEN_N)
    PER: tl.constexpr = 1 if FORMAT == "i8" else 2
    first = expert.to(tl.int64) * n
    row = first + from_channel.to(tl.int64)
    ks = tl.arange(0, BK)
    bytes_ = tl.arange(0, BK // PER)
    x_at = (slot // SLOTS).to(tl.int64) * x_row + (slot % SLOTS).to(tl.int64) * x_slot
    xs = x_ptr + x_at[None, :] + ks[:, None]
    ws = w_ptr + row[:, None] * tl.cdiv(k, PER) + bytes_[None, :]
    in_group = from_channel
    if GROUP > 0:
        in_group = first * tl.cdiv(k, GROUP) + from_channel
    acc = tl.zeros((BN, BM), tl.float32)
    for start in range(0, depth, BK):
        if EVEN_K:
            x = tl.load(xs, mask=there[None, :], other=0.0)
            q = tl.load(ws)
        else:
            x = tl.load(xs, mask=there[None, :] & (ks < k - start)[:, None], other=0.0)
            q = tl.load(ws, mask=(bytes_ * PER < k - start)[None, :], other=0)
        if FORMAT == "i8":
            acc = tl.dot(q.to(tl.float32).to(tl.bfloat16), x.to(tl.bfloat16), acc)
        elif FORMAT == "e2m1":
            group = start // GROUP + tl.arange(0, BK // GROUP)
            at = in_group[:, None] + group.to(tl.int64)[None, :] * n
            scale = tl.load(scales_ptr + at, mask=(group * GROUP < k)[None, :], other=0.0) * 0.5
            scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (BN, BK // GROUP, GROUP)), (BN, BK))
            wide = _e2m1_doubled(_halves(q, BN, BK)).to(tl.float32) * scale
            acc = tl.dot(wide.to(tl.bfloat16), x.to(tl.bfloat16), acc)
        else:
            at = in_group + start // GROUP * n
            wide = _halves(q, BN, BK).to(tl.float32)
            if zeros_ptr is not None:
                wide -= tl.load(zeros_ptr + at).to(tl.float32)[:, None]
            else:
                wide -= OFFSET
            scale = tl.load(scales_ptr + at).to(tl.float32)
            acc += tl.dot(wide.to(tl.bfloat16), x.to(tl.bfloat16)) * scale[:, None]
        xs += BK
        ws += BK // PER
    if FORMAT == "i8" and depth > 0:
        acc *= tl.load(scales_ptr + row)[:, None]
    if bias_ptr is not None and depth > 0:
        acc = _add_bias(acc, bias_ptr, first, from_channel, True)
    ys = y_ptr + slot.to(tl.int64)[None, :] * n + channel[:, None]
    tl.store(ys, acc.to(y_ptr.dtype.element_ty), mask=there[None, :] & (channel < n)[:, None])
