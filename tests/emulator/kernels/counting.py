"""Kernels of a model whose next token is a hash of all tokens before it, read back through page table and slots."""

import triton
import triton.language as tl


@triton.jit
def append(ids_ptr, slots_ptr, kv_ptr):
    """Writes each token into its slot of the cache."""
    t = tl.program_id(0)
    slot = tl.load(slots_ptr + t)
    if slot >= 0:
        tl.store(kv_ptr + slot, tl.load(ids_ptr + t))


@triton.jit
def digest(
    positions_ptr, table_ptr, start_ptr, rows_ptr, kv_ptr, shift_ptr, key_ptr, stride, seqs, BLOCK: tl.constexpr
):
    """The hash of the tokens up to that of a row of logits."""
    r = tl.program_id(0)
    row = tl.load(rows_ptr + r)
    s = 0
    while (s + 1 < seqs) & (tl.load(start_ptr + s + 1) <= row):
        s += 1
    total = tl.load(shift_ptr).to(tl.uint32)
    last = tl.load(positions_ptr + row)
    for p in range(0, last + 1):
        page = tl.load(table_ptr + s * stride + p // BLOCK)
        total = total * 31 + tl.load(kv_ptr + page * BLOCK + p % BLOCK).to(tl.uint32)
    tl.store(key_ptr + r, total.to(tl.int32))


@triton.jit
def spread(key_ptr, logits_ptr, VOCAB: tl.constexpr, WIDTH: tl.constexpr):
    """Logits that are 1 for the token that the hash names, and 0 for all others."""
    r = tl.program_id(0)
    key = tl.load(key_ptr + r).to(tl.uint32, bitcast=True)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    chosen = (10 + key % (VOCAB - 10)).to(tl.int32)
    tl.store(logits_ptr + r * VOCAB + column, tl.where(column == chosen, 1.0, 0.0), mask=column < VOCAB)
