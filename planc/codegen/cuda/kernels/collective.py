"""What surrounds a collective of ranks, in Triton: parts that lie one behind the other go to their columns."""

import triton
import triton.language as tl


@triton.jit
def place(x_ptr, y_ptr, count, WIDTH: tl.constexpr, TOTAL: tl.constexpr, STARTS: tl.constexpr, BLOCK: tl.constexpr):
    """y[row, STARTS[r] + c] = x[r, row, c] for `count` elements of rows of WIDTH of each r, in rows of TOTAL."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.program_id(1)
    there = at < count
    x = tl.load(x_ptr + rank.to(tl.int64) * count + at, mask=there).to(tl.float32)
    start = 0
    for r in tl.static_range(len(STARTS)):
        start = tl.where(rank == r, STARTS[r], start)
    place = at // WIDTH * TOTAL + start + at % WIDTH
    tl.store(y_ptr + place, x.to(y_ptr.dtype.element_ty), mask=there)
