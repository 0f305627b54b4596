"""Pointwise chains and moves of elements, in Triton: in go up to eight views that broadcast, out comes their result.

A chain is a constant: a tuple of (op, argument, ..), where an argument is ("v", n), the n-th of the inputs and earlier
results, or ("c", number). It is unrolled while compiling, so that a chain costs one pass over memory. Floats are
computed in float32, integers stay integers.
"""

import triton
import triton.language as tl

_WHOLE = tl.constexpr(8388608.0)  # 2^23: floats from here on have no fraction


@triton.jit
def _round(x):
    """To the nearest integer, ties to even."""
    size = tl.abs(x)
    whole = (size + _WHOLE) - _WHOLE
    return tl.where(size < _WHOLE, tl.where(x < 0.0, -whole, whole), x)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _expm1(x):
    """exp(x) - 1 by its series where the difference would lose digits."""
    series = x * (
        1.0 + x * (0.5 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720 + x * (1.0 / 5040))))))
    )
    return tl.where(tl.abs(x) < 0.35, series, tl.exp(x) - 1.0)


@triton.jit
def _log1p(x):
    """log(1 + x): what 1 + x lost by rounding is made good by the quotient."""
    wide = 1.0 + x
    lost = tl.where(wide == 1.0, 1.0, wide - 1.0)
    return tl.where(wide == 1.0, x, tl.where(tl.abs(x) < 1e8, tl.log(wide) * (x / lost), tl.log(wide)))


@triton.jit
def _tanh(x):
    """By the exponential of the size, by a series where that would lose digits."""
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    s = x * x
    near = x * (1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835 - s * (1382.0 / 155925))))))
    return tl.where(size < 0.3, near, tl.where(x < 0.0, -far, far))


@triton.jit
def _pow(x, y):
    """|x|^y by logarithms; a negative x takes whole powers only."""
    half = y * 0.5
    odd = tl.floor(half) != half
    size = tl.exp2(y * tl.log2(tl.abs(x)))
    signed = tl.where(tl.floor(y) == y, tl.where(odd, -size, size), float("nan"))
    return tl.where(y == 0.0, 1.0, tl.where(x < 0.0, signed, size))


@triton.jit
def _rest(x, y):
    """x less a whole multiple of y, of the sign of x and smaller than y: exact while the multiple is below 2^24."""
    quotient = tl.div_rn(x, y)
    rest = tl.fma(-tl.where(quotient < 0.0, tl.ceil(quotient), tl.floor(quotient)), y, x)
    size = tl.abs(y)
    over = (rest != 0.0) & ((rest < 0.0) != (x < 0.0))  # the quotient was rounded up to a whole number
    rest = tl.where(over, rest + tl.where(x < 0.0, -size, size), rest)
    return tl.where((size == float("inf")) & (tl.abs(x) < float("inf")), x, rest)


@triton.jit
def _whole_quotient(x, y):
    """Of integers, rounded down; 0 where y is 0."""
    divisor = tl.where(y == 0, 1, y)
    quotient = x // divisor
    inexact = (x - quotient * divisor != 0) & ((x < 0) != (divisor < 0))
    return tl.where(y == 0, 0, tl.where(inexact, quotient - 1, quotient))


@triton.jit
def _floor_divide(x, y):
    if x.dtype == tl.int32:
        return _whole_quotient(x, y)
    else:
        rest = _rest(x, y)
        quotient = tl.div_rn(x - rest, y)
        quotient = tl.where((rest != 0.0) & ((rest < 0.0) != (y < 0.0)), quotient - 1.0, quotient)
        whole = tl.floor(quotient)
        whole = tl.where(quotient - whole > 0.5, whole + 1.0, whole)
        return tl.where(y == 0.0, tl.div_rn(x, y), whole)


@triton.jit
def _remainder(x, y):
    """Of the sign of y; 0 where an integer y is 0."""
    if x.dtype == tl.int32:
        return tl.where(y == 0, 0, x - _whole_quotient(x, y) * y)
    else:
        rest = _rest(x, y)
        return tl.where((rest != 0.0) & ((rest < 0.0) != (y < 0.0)), rest + y, rest)


@triton.jit
def one(OP: tl.constexpr, x):
    """A function of one argument."""
    if OP == "copy":
        return x
    elif OP == "neg":
        return -x
    elif OP == "abs":
        return tl.abs(x)
    elif OP == "exp":
        return tl.exp(x)
    elif OP == "log":
        return tl.log(x)
    elif OP == "sqrt":
        return tl.sqrt_rn(x)
    elif OP == "rsqrt":
        return tl.rsqrt(x)
    elif OP == "reciprocal":
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
    elif OP == "square":
        return x * x
    elif OP == "cos":
        return tl.cos(x)
    elif OP == "sin":
        return tl.sin(x)
    elif OP == "tanh":
        return _tanh(x)
    elif OP == "erf":
        return tl.erf(x)
    elif OP == "sigmoid":
        return _sigmoid(x)
    elif OP == "silu":
        return x * _sigmoid(x)
    elif OP == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "relu2":
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return positive * positive
    elif OP == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif OP == "gelu_tanh":
        return 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif OP == "softplus":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + _log1p(tl.exp(-tl.abs(x)))
    elif OP == "floor":
        return tl.floor(x)
    elif OP == "ceil":
        return tl.ceil(x)
    elif OP == "trunc":
        return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))
    elif OP == "round":
        return _round(x)
    elif OP == "sign":
        return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)
    elif OP == "expm1":
        return _expm1(x)
    elif OP == "log1p":
        return _log1p(x)
    elif OP == "power2":
        return x * x
    elif OP == "power3":
        return x * x * x
    else:
        tl.static_assert(OP == "power4", "no such pointwise function")
        return (x * x) * (x * x)


@triton.jit
def gated(gate, up, there, ACT: tl.constexpr):
    """act(gate) * up of what these point to, in float32."""
    x = one(ACT, tl.load(gate, mask=there, other=0.0).to(tl.float32))
    return x * tl.load(up, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _two(OP: tl.constexpr, x, y):
    """A function of two arguments; comparisons give 1.0 or 0.0."""
    if OP == "add":
        return x + y
    elif OP == "sub":
        return x - y
    elif OP == "mul":
        return x * y
    elif OP == "div":
        return tl.div_rn(x, y)
    elif OP == "pow":
        return _pow(x, y)
    elif OP == "maximum":
        return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL) if x.dtype == tl.float32 else tl.maximum(x, y)
    elif OP == "minimum":
        return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL) if x.dtype == tl.float32 else tl.minimum(x, y)
    elif OP == "remainder":
        return _remainder(x, y)
    elif OP == "floor_divide":
        return _floor_divide(x, y)
    elif OP == "gt":
        return (x > y).to(tl.float32)
    elif OP == "ge":
        return (x >= y).to(tl.float32)
    elif OP == "lt":
        return (x < y).to(tl.float32)
    elif OP == "le":
        return (x <= y).to(tl.float32)
    elif OP == "eq":
        return (x == y).to(tl.float32)
    else:
        tl.static_assert(OP == "ne", "no such pointwise function")
        return (x != y).to(tl.float32)


@triton.jit
def _value(values, ARG: tl.constexpr, SHAPE: tl.constexpr):
    """An argument of a statement; a number takes the type of the inputs."""
    if ARG[0] == "v":
        return values[ARG[1]]
    elif values[0].dtype == tl.int32:
        return tl.full(SHAPE, ARG[1], tl.int32)
    else:
        return tl.full(SHAPE, ARG[1], tl.float32)


@triton.jit
def _apply(values, CODE: tl.constexpr, SHAPE: tl.constexpr):
    """One statement."""
    x = _value(values, CODE[1], SHAPE)
    if len(CODE) == 2:
        return one(CODE[0], x)
    elif len(CODE) == 3:
        return _two(CODE[0], x, _value(values, CODE[2], SHAPE))
    else:
        return tl.where(x != 0, _value(values, CODE[2], SHAPE), _value(values, CODE[3], SHAPE))


@triton.jit
def _load(ptr, row, column, there, EXTENT: tl.constexpr, STRIDE: tl.constexpr):
    """A tile of a view; floats in float32."""
    x = tl.load(ptr + _at(row, column, EXTENT, STRIDE), mask=there, other=0)
    return x.to(tl.float32) if x.dtype.is_floating() else x


@triton.jit
def _at(row, column, EXTENT: tl.constexpr, STRIDE: tl.constexpr):
    """Offsets of elements: STRIDE is that of a row, then of each axis of EXTENT, of which the first needs no bound."""
    at = row.to(tl.int64)[:, None] * STRIDE[0]
    rest = column
    for axis in tl.static_range(len(EXTENT) - 1, -1, -1):
        if axis > 0:
            at += (rest % EXTENT[axis] * STRIDE[axis + 1])[None, :]
            rest = rest // EXTENT[axis]
        else:
            at += (rest * STRIDE[1])[None, :]
    return at


@triton.jit
def pointwise(
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    e_ptr,
    f_ptr,
    g_ptr,
    h_ptr,
    out_ptr,
    rows,
    CODE: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    EXTENT: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Elements of ROWS rows by BLOCK of their WIDTH features. INPUTS has the strides of each input, OUT those of the
    output; the last statement of CODE is the result."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = (row < rows)[:, None] & (column < WIDTH)[None, :]
    values = (_load(a_ptr, row, column, there, EXTENT, INPUTS[0]),)
    if b_ptr is not None:
        values = values + (_load(b_ptr, row, column, there, EXTENT, INPUTS[1]),)
    if c_ptr is not None:
        values = values + (_load(c_ptr, row, column, there, EXTENT, INPUTS[2]),)
    if d_ptr is not None:
        values = values + (_load(d_ptr, row, column, there, EXTENT, INPUTS[3]),)
    if e_ptr is not None:
        values = values + (_load(e_ptr, row, column, there, EXTENT, INPUTS[4]),)
    if f_ptr is not None:
        values = values + (_load(f_ptr, row, column, there, EXTENT, INPUTS[5]),)
    if g_ptr is not None:
        values = values + (_load(g_ptr, row, column, there, EXTENT, INPUTS[6]),)
    if h_ptr is not None:
        values = values + (_load(h_ptr, row, column, there, EXTENT, INPUTS[7]),)
    for i in tl.static_range(len(CODE)):
        values = values + (_apply(values, CODE[i], (ROWS, BLOCK)),)
    result = values[len(INPUTS) + len(CODE) - 1]
    tl.store(out_ptr + _at(row, column, EXTENT, OUT), result.to(out_ptr.dtype.element_ty), mask=there)
