"""Rows of a table by index, in Triton.

`embedding` widens the rows of ids, which may be floats or codes; `take_rows` moves rows as they are.
"""

import triton
import triton.language as tl


@triton.jit
def embedding(
    table_ptr,
    scales_ptr,
    zeros_ptr,
    ids_ptr,
    y_ptr,
    FORMAT: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y[t] = the row ids[t] of a table of COUNT rows; an id outside of it gives zeros.

    FORMAT is `float`, `code` (8 bits), `u4` or `e2m1` (two a byte). Scales belong to a row, or to GROUP neighbours.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token).to(tl.int64)
    limit = tl.where((row >= 0) & (row < COUNT), WIDTH, 0)
    there = column < limit
    if FORMAT == "float" or FORMAT == "code":
        x = tl.load(table_ptr + row * WIDTH + column, mask=there, other=0.0).to(tl.float32)
    else:
        pair = tl.load(table_ptr + row * ((WIDTH + 1) // 2) + column // 2, mask=there, other=0).to(tl.int32)
        code = (pair >> (column % 2 * 4)) & 15
        if FORMAT == "e2m1":
            exponent = (code >> 1) & 3
            size = tl.where(exponent == 0, code & 1, ((2 + (code & 1)) << exponent) >> 1)
            x = tl.where(code > 7, -size, size).to(tl.float32) * 0.5
        else:
            x = code.to(tl.float32) - OFFSET
    if GROUP > 0:
        at = (column // GROUP).to(tl.int64) * COUNT + row
        if zeros_ptr is not None:
            x -= tl.load(zeros_ptr + at, mask=there, other=0.0).to(tl.float32)
        x *= tl.load(scales_ptr + at, mask=there, other=0.0).to(tl.float32)
    elif FORMAT != "float":
        x *= tl.load(scales_ptr + row, mask=limit > 0, other=0.0)
    tl.store(y_ptr + token * WIDTH + column, x.to(y_ptr.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def take_rows(x_ptr, index_ptr, y_ptr, x_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """y[r] = x[index[r]]."""
    r = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index_ptr + r).to(tl.int64)
    tl.store(
        y_ptr + r * WIDTH + column, tl.load(x_ptr + row * x_row + column, mask=column < WIDTH), mask=column < WIDTH
    )
