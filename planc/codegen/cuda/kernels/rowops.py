"""Ops along the last axis, in Triton: reductions, softmax, running sums, argmax, topk, gather, scatter; and matmul.

A program takes ROWS vectors and walks them in steps of BLOCK, so that the order of additions depends on the width
alone. Outputs are dense. A NaN goes through as numpy lets it.
"""

import triton
import triton.language as tl

from planc.codegen.cuda.kernels.norm import start_of

_LAST = tl.constexpr(2147483647)
_FIRST = tl.constexpr(-2147483648)


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _largest(x):
    """The largest of each row; NaN where there is one."""
    has_nan = tl.max((x != x).to(tl.int32), axis=1) > 0
    return tl.where(has_nan, float("nan"), tl.max(x, axis=1))


@triton.jit
def reduce(
    x_ptr,
    y_ptr,
    vectors,
    OP: tl.constexpr,
    WIDTH: tl.constexpr,
    EXTENT: tl.constexpr,
    INNER: tl.constexpr,
    X: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each vector's `sum`, `mean`, `amax`, `amin` or `prod`."""
    vector = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = vector < vectors
    column = tl.arange(0, BLOCK)
    xs = x_ptr + start_of(vector, EXTENT, INNER, X)[:, None] + column[None, :]
    START: tl.constexpr = 1.0 if OP == "prod" else (0.0 if OP == "sum" or OP == "mean" else float("-inf"))
    found = tl.full((ROWS, BLOCK), START, tl.float32)
    for start in range(0, WIDTH, BLOCK):
        inside = there[:, None] & (column < WIDTH - start)[None, :]
        x = tl.load(xs + start, mask=inside, other=0.0).to(tl.float32)
        if OP == "sum" or OP == "mean":
            found += x
        elif OP == "prod":
            found *= tl.where(inside, x, 1.0)
        else:
            x = -x if OP == "amin" else x
            found = tl.maximum(found, tl.where(inside, x, START), propagate_nan=tl.PropagateNan.ALL)
    if OP == "sum":
        y = tl.sum(found, axis=1)
    elif OP == "mean":
        y = tl.sum(found, axis=1) / WIDTH
    elif OP == "prod":
        y = tl.reduce(found, 1, _times)
    elif OP == "amax":
        y = _largest(found)
    else:
        y = -_largest(found)
    tl.store(y_ptr + vector, y.to(y_ptr.dtype.element_ty), mask=there)


@triton.jit
def softmax(
    x_ptr,
    y_ptr,
    vectors,
    WIDTH: tl.constexpr,
    EXTENT: tl.constexpr,
    INNER: tl.constexpr,
    X: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """exp(x - largest) over its sum; a row of -inf alone gives NaN."""
    vector = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = vector < vectors
    column = tl.arange(0, BLOCK)
    xs = x_ptr + start_of(vector, EXTENT, INNER, X)[:, None] + column[None, :]
    ys = y_ptr + vector.to(tl.int64)[:, None] * WIDTH + column[None, :]
    low = tl.full((ROWS, BLOCK), float("-inf"), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        inside = there[:, None] & (column < WIDTH - start)[None, :]
        low = tl.maximum(low, tl.load(xs + start, mask=inside, other=float("-inf")).to(tl.float32))
    top = tl.max(low, axis=1)[:, None]
    parts = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        inside = there[:, None] & (column < WIDTH - start)[None, :]
        x = tl.load(xs + start, mask=inside, other=float("-inf")).to(tl.float32)
        parts += tl.where(inside, tl.exp(x - top), 0.0)
    total = tl.sum(parts, axis=1)[:, None]
    for start in range(0, WIDTH, BLOCK):
        inside = there[:, None] & (column < WIDTH - start)[None, :]
        x = tl.load(xs + start, mask=inside, other=float("-inf")).to(tl.float32)
        tl.store(ys + start, (tl.exp(x - top) / total).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def cumsum(
    x_ptr,
    y_ptr,
    vectors,
    WIDTH: tl.constexpr,
    EXTENT: tl.constexpr,
    INNER: tl.constexpr,
    X: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of x from the first element to each."""
    vector = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = vector < vectors
    column = tl.arange(0, BLOCK)
    xs = x_ptr + start_of(vector, EXTENT, INNER, X)[:, None] + column[None, :]
    ys = y_ptr + vector.to(tl.int64)[:, None] * WIDTH + column[None, :]
    before = tl.zeros((ROWS,), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        inside = there[:, None] & (column < WIDTH - start)[None, :]
        x = tl.load(xs + start, mask=inside, other=0.0).to(tl.float32)
        tl.store(ys + start, (before[:, None] + tl.cumsum(x, axis=1)).to(y_ptr.dtype.element_ty), mask=inside)
        before += tl.sum(x, axis=1)


@triton.jit
def _key(x, LARGEST: tl.constexpr):
    """Integers in the order of floats, the best the largest; a NaN is above every number. -0.0 is 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(x != x, 0x7FFFFFFF, key)
    return key if LARGEST else -1 - key


@triton.jit
def argmax(
    x_ptr,
    y_ptr,
    vectors,
    WIDTH: tl.constexpr,
    EXTENT: tl.constexpr,
    INNER: tl.constexpr,
    X: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The index of the largest, of equals the first; a NaN is the largest."""
    vector = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = vector < vectors
    column = tl.arange(0, BLOCK)
    xs = x_ptr + start_of(vector, EXTENT, INNER, X)[:, None] + column[None, :]
    best = tl.full((ROWS, BLOCK), _FIRST, tl.int32)
    index = tl.zeros((ROWS, BLOCK), tl.int32)
    for start in range(0, WIDTH, BLOCK):
        inside = there[:, None] & (column < WIDTH - start)[None, :]
        x = tl.load(xs + start, mask=inside, other=0.0).to(tl.float32)
        key = tl.where(inside, _key(x, True), _FIRST)
        index = tl.where(key > best, start + column[None, :], index)
        best = tl.maximum(best, key)
    top = tl.max(best, axis=1)[:, None]
    first = tl.min(tl.where(best == top, index, _LAST), axis=1)
    tl.store(y_ptr + vector, first, mask=there)


@triton.jit
def topk(
    x_ptr,
    values_ptr,
    index_ptr,
    vectors,
    COUNT: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    EXTENT: tl.constexpr,
    INNER: tl.constexpr,
    X: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The COUNT best, best first, of equals the first; the vector is in registers, its best is taken COUNT times."""
    vector = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = vector < vectors
    column = tl.arange(0, BLOCK)[None, :]
    inside = there[:, None] & (column < WIDTH)
    x = tl.load(x_ptr + start_of(vector, EXTENT, INNER, X)[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    key = _key(x, LARGEST)
    left = inside
    out = vector.to(tl.int64) * COUNT
    for j in range(COUNT):
        top = tl.max(tl.where(left, key, _FIRST), axis=1)[:, None]
        at = tl.min(tl.where(left & (key == top), column, _LAST), axis=1)
        mine = column == at[:, None]
        tl.store(values_ptr + out + j, tl.sum(tl.where(mine, x, 0.0), axis=1), mask=there)
        tl.store(index_ptr + out + j, at, mask=there)
        left = left & (column != at[:, None])


@triton.jit
def gather(
    x_ptr,
    index_ptr,
    y_ptr,
    vectors,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    EXTENT: tl.constexpr,
    INNER: tl.constexpr,
    X: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y[j] = x[index[j]] for COUNT indices; one outside of WIDTH gives 0."""
    vector = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = (vector < vectors)[:, None] & (j < COUNT)[None, :]
    at = tl.load(index_ptr + start_of(vector, EXTENT, INNER, INDEX)[:, None] + j[None, :], mask=there, other=0)
    inside = there & (at >= 0) & (at < WIDTH)
    x = tl.load(x_ptr + start_of(vector, EXTENT, INNER, X)[:, None] + at, mask=inside, other=0)
    tl.store(y_ptr + vector.to(tl.int64)[:, None] * COUNT + j[None, :], x, mask=there)


@triton.jit
def scatter(
    x_ptr,
    index_ptr,
    source_ptr,
    y_ptr,
    vectors,
    VALUE: tl.constexpr,
    ADD: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    STEP: tl.constexpr,
    EXTENT: tl.constexpr,
    INNER: tl.constexpr,
    X: tl.constexpr,
    INDEX: tl.constexpr,
    SOURCE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x, but for y[index[j]] = (or +=) source[j * STEP], or VALUE, j ascending; an index outside of WIDTH writes
    nothing."""
    vector = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = vector < vectors
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = there[:, None] & (column < WIDTH)[None, :]
    y = tl.load(x_ptr + start_of(vector, EXTENT, INNER, X)[:, None] + column[None, :], mask=inside, other=0.0)
    y = y.to(tl.float32)
    index = index_ptr + start_of(vector, EXTENT, INNER, INDEX)
    for j in range(COUNT):
        mine = tl.load(index + j, mask=there, other=-1)[:, None] == column[None, :]
        new = tl.full((ROWS, 1), VALUE, tl.float32)
        if source_ptr is not None:
            source = source_ptr + start_of(vector, EXTENT, INNER, SOURCE) + j * STEP
            new = tl.load(source, mask=there, other=0.0).to(tl.float32)[:, None]
        y = tl.where(mine, y + new if ADD else new, y)
    out = y_ptr + vector.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def matmul(
    a_ptr,
    b_ptr,
    y_ptr,
    m,
    a_line,
    b_line,
    N: tl.constexpr,
    K: tl.constexpr,
    EXTENT: tl.constexpr,
    INNER: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """y = a @ b in float32 for each matrix of a batch; lines of a and b lie a_line and b_line apart."""
    batch = tl.program_id(0)
    line = tl.program_id(1) * BM + tl.arange(0, BM)
    column = tl.program_id(2) * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    a_at = a_ptr + start_of(batch, EXTENT, INNER, A) + line.to(tl.int64)[:, None] * a_line + ks[None, :]
    b_at = b_ptr + start_of(batch, EXTENT, INNER, B) + ks.to(tl.int64)[:, None] * b_line + column[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        inside = ks < K - start
        a = tl.load(a_at + start, mask=(line < m)[:, None] & inside[None, :], other=0.0)
        b = tl.load(b_at, mask=inside[:, None] & (column < N)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        b_at += BK * b_line
    out = (batch.to(tl.int64) * m + line)[:, None] * N + column[None, :]
    tl.store(y_ptr + out, acc.to(y_ptr.dtype.element_ty), mask=(line < m)[:, None] & (column < N)[None, :])
