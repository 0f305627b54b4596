"""Mixtures of experts, in Triton: in go the experts of each slot, out come slots in tiles of one expert each.

A slot is one of a token's chosen experts. `place` puts the slots of each expert together, in ascending order and in
whole tiles of BM, so that a product may take one expert's weights for all rows of a tile. Slots whose id names no
expert are the last group. Nothing is atomic: the order is the same in every run.
"""

import triton
import triton.language as tl


@triton.jit
def _is_mine(ids_ptr, at, slots, expert, EXPERTS: tl.constexpr, PERIOD: tl.constexpr):
    """Which slots belong to an expert; PERIOD tells that ids repeat for every token."""
    there = at < slots
    if PERIOD > 0:
        chosen = tl.load(ids_ptr + at % PERIOD, mask=there, other=0)
    else:
        chosen = tl.load(ids_ptr + at, mask=there, other=0)
    none = (chosen < 0) | (chosen >= EXPERTS)
    return there & tl.where(expert == EXPERTS, none, chosen == expert)


@triton.jit
def count(ids_ptr, counts_ptr, slots, EXPERTS: tl.constexpr, PERIOD: tl.constexpr, BLOCK: tl.constexpr):
    """How many slots each expert has, those of none last."""
    expert = tl.program_id(0)
    found = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, slots, BLOCK):
        found += _is_mine(ids_ptr, start + tl.arange(0, BLOCK), slots, expert, EXPERTS, PERIOD).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(found, axis=0))


@triton.jit
def place(
    ids_ptr,
    counts_ptr,
    experts_ptr,
    slots_ptr,
    slots,
    tiles,
    BM: tl.constexpr,
    GROUPS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PERIOD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The expert of each tile (-1 past the last) and the slot of each of its rows (-1 where it has none)."""
    expert = tl.program_id(0)
    group = tl.arange(0, GROUPS)
    counts = tl.load(counts_ptr + group, mask=group <= EXPERTS, other=0)
    tiles_of = tl.cdiv(counts, BM)
    first = tl.sum(tl.where(group < expert, tiles_of, 0), axis=0)
    last = first + tl.sum(tl.where(group == expert, tiles_of, 0), axis=0)
    index = tl.arange(0, BLOCK)
    for start in range(first, last, BLOCK):
        tl.store(experts_ptr + start + index, expert, mask=start + index < last)
    if expert == EXPERTS:
        for start in range(last, tiles, BLOCK):
            tl.store(experts_ptr + start + index, -1, mask=start + index < tiles)
    at = first * BM
    for start in range(0, slots, BLOCK):
        mine = _is_mine(ids_ptr, start + index, slots, expert, EXPERTS, PERIOD)
        rank = tl.cumsum(mine.to(tl.int32), axis=0)
        tl.store(slots_ptr + at + rank - 1, start + index, mask=mine)
        at += tl.sum(mine.to(tl.int32), axis=0)
    rest = at + tl.arange(0, BM)
    tl.store(slots_ptr + rest, -1, mask=rest < last * BM)


@triton.jit
def weighted_sum(
    y_ptr,
    w_ptr,
    out_ptr,
    y_row,
    y_slot,
    w_row,
    width,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t] = sum over j of w[t, j] y[t, j], j ascending."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(SLOTS):
        part = tl.load(y_ptr + token * y_row + j * y_slot + at, mask=there, other=0.0).to(tl.float32)
        total += part * tl.load(w_ptr + token * w_row + j).to(tl.float32)
    tl.store(out_ptr + token * width + at, total.to(out_ptr.dtype.element_ty), mask=there)
