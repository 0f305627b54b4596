"""Attention over a paged cache, in Triton: in go queries, pages and page tables, out come weighted sums of values.

A tile is BM rows: TM tokens of one sequence, each with HEADS query heads that share a KV head. Keys are taken in splits
of SPLIT positions, counted from position 0, and a split in blocks of BN. A split has a softmax of its own; splits are
merged in order. `attend` does all of a tile in one program; `attend_split` makes one split, and `combine` merges. Both
ways, and every tile that holds a token, give the same bits: the steps of a row depend on its own position, since a
split or block that a row does not see changes nothing of it. So that no compiler may contract one of the ways and not
the other, a product that is added to something is an explicit fma.

The pages are those of kernels/kv.py. Scores are in units of log 2, for exp2.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(tile, tokens, seqs, start_ptr, TM: tl.constexpr, SEQS: tl.constexpr):
    """A tile's sequence, its first token, and where the sequence's tokens end.

    Sequence s has the tiles from start[s] // TM + s on, which is room for all of its tokens: the rest of its tiles have
    none. The last sequence has the padding too, up to `tokens`: its rows are written, as zeros.
    """
    seq = -1
    for base in range(0, seqs, SEQS):
        i = base + tl.arange(0, SEQS)
        first = tl.load(start_ptr + i, mask=i < seqs, other=0)
        seq += tl.sum(((first // TM + i <= tile) & (i < seqs)).to(tl.int32), axis=0)
    first = tl.load(start_ptr + seq)
    live = tl.load(start_ptr + seq + 1)
    token = first + (tile - (first // TM + seq)) * TM
    return seq, token, live, tl.where(seq == seqs - 1, tokens, live)


@triton.jit
def _lowest(pos, KIND: tl.constexpr, WINDOW: tl.constexpr):
    """The first key that a query at `pos` sees."""
    if KIND == "sliding":
        return tl.maximum(pos - (WINDOW - 1), 0)
    elif KIND == "chunked":
        return pos // WINDOW * WINDOW
    else:
        return pos * 0


@triton.jit
def _rows(
    token,
    live,
    positions_ptr,
    BM: tl.constexpr,
    TM: tl.constexpr,
    HEADS: tl.constexpr,
    KIND: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Of each row of a tile: token and head, the last and the first key that it sees (-1 and 0: none); and the first
    and the end of the keys that any row sees."""
    row = tl.arange(0, BM)
    at, head = token + row // HEADS, row % HEADS
    used = (at < live) & (row < TM * HEADS)
    pos = tl.load(positions_ptr + at, mask=used, other=-1)
    low = _lowest(tl.maximum(pos, 0), KIND, WINDOW)
    begin = tl.min(tl.where(used, low, 2147483647), axis=0)
    return at, head, pos, low, begin, tl.max(pos, axis=0) + 1


@triton.jit
def _queries(
    q_ptr,
    token,
    head,
    there,
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    K_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The queries of a tile: f32 where keys are (WIDE), else bf16."""
    i = tl.arange(0, K_PAD)
    at = token.to(tl.int64)[:, None] * Q_ROW + head[:, None] * Q_HEAD + i[None, :]
    q = tl.load(q_ptr + at, mask=there[:, None] & (i < K_DIM)[None, :], other=0.0)
    return q.to(tl.float32 if WIDE else tl.bfloat16)


@triton.jit
def _split(
    q,
    pos,
    low,
    slope,
    begin,
    end,
    kv_head,
    table_ptr,
    k_ptr,
    v_ptr,
    ks_ptr,
    vs_ptr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    PAGE: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Softmax of the keys from `begin` (a multiple of BN) to `end`: peak [BM], sum [BM], sums of values [BM, V_PAD]."""
    peak = tl.full([BM], -3.0e38, tl.float32)  # finite, so that the difference of two is 0
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, V_PAD], tl.float32)
    i, j = tl.arange(0, K_PAD), tl.arange(0, V_PAD)
    k_ptr += kv_head * (K_DIM * BLOCK)
    v_ptr += kv_head * (V_DIM * BLOCK)
    for start in range(begin, end, BN):
        at = tl.multiple_of(start, BN) + tl.arange(0, BN)
        there = at < end
        page = tl.load(table_ptr + at // BLOCK, mask=there, other=0).to(tl.int64)
        inside = at % BLOCK

        # RUN keys and more lie together in a page, which cannot be seen through the page table
        k_at = tl.max_contiguous(tl.multiple_of(page * PAGE + inside, RUN), RUN)
        k_of = k_ptr + k_at[None, :] + (i * BLOCK)[:, None]
        k = tl.load(k_of, mask=(at // BLOCK * BLOCK < end)[None, :] & (i < K_DIM)[:, None], other=0.0)
        s = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        if SCALES > 0:
            scale_at = page * SCALES + kv_head * BLOCK + inside
            s = s * tl.load(ks_ptr + scale_at, mask=there, other=0.0)[None, :]
        s = _scored(s, SCALE, SOFTCAP)
        if slope is not None:
            s = tl.fma((at[None, :] - pos[:, None]).to(tl.float32), slope[:, None], s)
        seen = (at[None, :] <= pos[:, None]) & (at[None, :] >= low[:, None])
        s = tl.where(seen, s, -3.0e38)

        new = tl.maximum(peak, tl.max(s, axis=1))
        p = tl.where(seen, tl.exp2(s - new[:, None]), 0.0)
        old = tl.exp2(peak - new)
        total = tl.fma(total, old, tl.sum(p, axis=1))
        v_of = v_ptr + (page * PAGE + inside * V_DIM)[:, None] + j[None, :]
        v = tl.load(v_of, mask=there[:, None] & (j < V_DIM)[None, :], other=0.0).to(q.dtype)
        if SCALES > 0:
            p = tl.where(seen, p * tl.load(vs_ptr + scale_at, mask=there, other=0.0)[None, :], 0.0)
        acc = tl.dot(p.to(q.dtype), v, acc * old[:, None], input_precision="ieee")
        peak = new
    return peak, total, acc


@triton.jit
def _scored(s, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Products to scores, in units of log 2."""
    LOG2E: tl.constexpr = 1.4426950408889634
    if SOFTCAP == 0.0:
        return s * (SCALE * LOG2E)
    else:  # cap tanh(x / cap), where tanh(y) = 1 - 2 / (exp(2 y) + 1)
        half = 1.0 / (tl.exp2(s * (2.0 * SCALE / SOFTCAP * LOG2E)) + 1.0)
        return tl.fma(half, -2.0 * SOFTCAP * LOG2E, SOFTCAP * LOG2E)


@triton.jit
def _merged(peak, total, acc, next_peak, next_total, next_acc):
    """What was merged so far, and one more split."""
    new = tl.maximum(peak, next_peak)
    old, add = tl.exp2(peak - new), tl.exp2(next_peak - new)
    total = tl.fma(total, old, next_total * add)
    acc = tl.fma(acc, old[:, None], next_acc * add[:, None])
    return new, total, acc


@triton.jit
def _finished(peak, total, acc, sink):
    """The weighted mean. A sink is one more score, without a value. Rows that saw nothing are 0."""
    if sink is not None:
        new = tl.maximum(peak, sink)
        old = tl.exp2(peak - new)
        total = tl.fma(total, old, tl.exp2(sink - new))
        acc = acc * old[:, None]
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _of_head(ptr, head, there):
    """A score of each head, in units of log 2."""
    return tl.load(ptr + head, mask=there, other=0.0).to(tl.float32) * 1.4426950408889634


@triton.jit
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    ks_ptr,
    vs_ptr,
    table_ptr,
    start_ptr,
    positions_ptr,
    sinks_ptr,
    slopes_ptr,
    out_ptr,
    tokens,
    seqs,
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    OUT_ROW: tl.constexpr,
    TABLE: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
    SEQS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    PAGE: tl.constexpr,
    SCALES: tl.constexpr,
    WIDE: tl.constexpr,
    KIND: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """All of one tile and KV head (program axes 0 and 1; axis 2 are further HEADS of the group). Tiles are taken from
    the end: the later ones have more keys."""
    TM: tl.constexpr = BM // HEADS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, part = tl.program_id(1), tl.program_id(2)
    seq, token, live, end = _tile(tile, tokens, seqs, start_ptr, TM, SEQS)
    if token < end:
        at, head, pos, low, first, last = _rows(token, live, positions_ptr, BM, TM, HEADS, KIND, WINDOW)
        there = (at < end) & (tl.arange(0, BM) < TM * HEADS) & (part * HEADS + head < GROUP)
        head = kv_head * GROUP + part * HEADS + head
        q = _queries(q_ptr, at, head, there, Q_ROW, Q_HEAD, K_DIM, K_PAD, WIDE)
        slope = None if slopes_ptr is None else _of_head(slopes_ptr, head, there)
        peak = tl.full([BM], -3.0e38, tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, V_PAD], tl.float32)
        for split in range(first // SPLIT, tl.cdiv(last, SPLIT)):
            next_peak, next_total, next_acc = _split(
                q,
                pos,
                low,
                slope,
                tl.maximum(split * SPLIT, first // BN * BN),
                tl.minimum(split * SPLIT + SPLIT, last),
                kv_head,
                table_ptr + seq.to(tl.int64) * TABLE,
                k_ptr,
                v_ptr,
                ks_ptr,
                vs_ptr,
                BM,
                BN,
                K_DIM,
                V_DIM,
                K_PAD,
                V_PAD,
                BLOCK,
                RUN,
                PAGE,
                SCALES,
                SCALE,
                SOFTCAP,
            )
            peak, total, acc = _merged(peak, total, acc, next_peak, next_total, next_acc)
        sink = None if sinks_ptr is None else _of_head(sinks_ptr, head, there)
        out = _finished(peak, total, acc, sink)
        j = tl.arange(0, V_PAD)
        to = at.to(tl.int64)[:, None] * OUT_ROW + head[:, None] * V_DIM + j[None, :]
        tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=there[:, None] & (j < V_DIM)[None, :])


@triton.jit
def attend_split(
    q_ptr,
    k_ptr,
    v_ptr,
    ks_ptr,
    vs_ptr,
    table_ptr,
    start_ptr,
    positions_ptr,
    slopes_ptr,
    stats_ptr,
    acc_ptr,
    tokens,
    seqs,
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    Q_HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    TABLE: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
    SEQS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    PAGE: tl.constexpr,
    SCALES: tl.constexpr,
    WIDE: tl.constexpr,
    KIND: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """One split (program axis 2) of a tile and KV head (axis 1 counts parts of the group, then KV heads).

    Writes f32 stats [tokens, Q_HEADS, SPLITS, 2], the peak and the sum, and acc [tokens, Q_HEADS, SPLITS, V_DIM], of
    splits that the tile has.
    """
    TM: tl.constexpr = BM // HEADS
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    tile, split = tl.program_id(0), tl.program_id(2)
    kv_head, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    seq, token, live, _ = _tile(tile, tokens, seqs, start_ptr, TM, SEQS)
    if token < live:
        at, head, pos, low, first, last = _rows(token, live, positions_ptr, BM, TM, HEADS, KIND, WINDOW)
        if (split * SPLIT < last) & (split * SPLIT + SPLIT > first):
            there = (at < live) & (tl.arange(0, BM) < TM * HEADS) & (part * HEADS + head < GROUP)
            head = kv_head * GROUP + part * HEADS + head
            q = _queries(q_ptr, at, head, there, Q_ROW, Q_HEAD, K_DIM, K_PAD, WIDE)
            slope = None if slopes_ptr is None else _of_head(slopes_ptr, head, there)
            peak, total, acc = _split(
                q,
                pos,
                low,
                slope,
                tl.maximum(split * SPLIT, first // BN * BN),
                tl.minimum(split * SPLIT + SPLIT, last),
                kv_head,
                table_ptr + seq.to(tl.int64) * TABLE,
                k_ptr,
                v_ptr,
                ks_ptr,
                vs_ptr,
                BM,
                BN,
                K_DIM,
                V_DIM,
                K_PAD,
                V_PAD,
                BLOCK,
                RUN,
                PAGE,
                SCALES,
                SCALE,
                SOFTCAP,
            )
            to = (at.to(tl.int64) * Q_HEADS + head) * SPLITS + split
            tl.store(stats_ptr + to * 2, peak, mask=there)
            tl.store(stats_ptr + to * 2 + 1, total, mask=there)
            j = tl.arange(0, V_PAD)
            tl.store(acc_ptr + to[:, None] * V_DIM + j[None, :], acc, mask=there[:, None] & (j < V_DIM)[None, :])


@triton.jit
def combine(
    stats_ptr,
    acc_ptr,
    start_ptr,
    positions_ptr,
    sinks_ptr,
    out_ptr,
    seqs,
    OUT_ROW: tl.constexpr,
    Q_HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    KIND: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Merges the splits of ROWS heads (program axis 1) of a token (axis 0), in order. Padding becomes zeros."""
    token = tl.program_id(0)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = head < Q_HEADS
    j = tl.arange(0, V_PAD)
    mask = there[:, None] & (j < V_DIM)[None, :]
    pos = tl.load(positions_ptr + token)
    live = token < tl.load(start_ptr + seqs)
    peak = tl.full([ROWS], -3.0e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, V_PAD], tl.float32)
    row = (token.to(tl.int64) * Q_HEADS + head) * SPLITS
    for split in range(_lowest(pos, KIND, WINDOW) // SPLIT, tl.where(live, pos // SPLIT + 1, 0)):
        at = row + split
        next_peak = tl.load(stats_ptr + at * 2, mask=there, other=0.0)
        next_total = tl.load(stats_ptr + at * 2 + 1, mask=there, other=0.0)
        next_acc = tl.load(acc_ptr + at[:, None] * V_DIM + j[None, :], mask=mask, other=0.0)
        peak, total, acc = _merged(peak, total, acc, next_peak, next_total, next_acc)
    sink = None if sinks_ptr is None else _of_head(sinks_ptr, head, there)
    out = _finished(peak, total, acc, sink)
    to = token.to(tl.int64) * OUT_ROW + head[:, None] * V_DIM + j[None, :]
    tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=mask)
