"""What surrounds a collective of ranks, in Triton: parts that lie one behind the other go to their columns."""

import triton
import triton.language as tl


@triton.jit
def place(x_ptr, y_ptr, count, WIDTH: tl.constexpr, TOTAL: tl.constexpr, START: tl.constexpr, BLOCK: tl.constexpr):
    """y[row, START + c] = x[row, c] for `count` elements of rows of WIDTH, in rows of TOTAL."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    x = tl.load(x_ptr + at, mask=there).to(tl.float32)
    place = at // WIDTH * TOTAL + START + at % WIDTH
    tl.store(y_ptr + place, x.to(y_ptr.dtype.element_ty), mask=there)
