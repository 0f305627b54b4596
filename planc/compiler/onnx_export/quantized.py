"""Quantized weights and rounded rows as ONNX: codes stay codes in the file, and become float32 where they are used.

Codes of 4 bits lie one a byte. What onnxruntime cannot gather, codes of float8 and bf16, is widened before.
"""

from collections.abc import Callable, Sequence

import numpy as np

from planc.compiler.ir import hadamard
from planc.compiler.ir.graph import Node
from planc.compiler.ir.operands import operands, rounding, scheme_of
from planc.compiler.ir.quant import E2M1, LIMITS, Scheme
from planc.compiler.onnx_export.emitter import Emitter

Take = Callable[[str], str]


def quantize_rows(e: Emitter, n: Node) -> Sequence[str]:
    """Rows over their largest magnitude, rounded to even, once they have turned; a row of zeros stays."""
    _, shift, outliers = rounding(n.inputs, [e.type(i) for i in n.inputs])
    x, dtype = _turned(e, n, shift), str(n.attr("dtype"))
    group, shape = int(n.attr("group", 0)), e.type(n.inputs[0]).shape  # type: ignore[arg-type]
    if group:
        x = e.op("Reshape", x, e.ints(-1, *map(int, shape[1:-1]), int(shape[-1]) // group, group))
    limit = e.const(float(LIMITS[dtype]))
    scale = e.op("Div", e.op("ReduceMax", e.op("Abs", x), e.ints(-1), keepdims=1), limit)
    safe = e.op("Where", e.op("Equal", scale, e.const(0.0)), e.const(1.0), scale)
    ratio = e.op("Clip", e.op("Div", x, safe), e.op("Neg", limit), limit)
    codes = e.cast(e.op("Round", ratio) if dtype == "i8" else ratio, dtype)
    if outliers is not None:
        codes = _with_second_digits(e, ratio, codes, e.value(outliers), dtype)
    if group:
        codes = e.op("Reshape", codes, e.ints(-1, *map(int, shape[1:])))
    return codes, e.op("Squeeze", scale, e.ints(-1))


def _with_second_digits(e: Emitter, ratio: str, codes: str, outliers: str, dtype: str) -> str:
    """The codes and, behind them, those of what rounding took from the outliers, and the outliers' own again."""
    wide = e.cast(codes, "f32")
    again = e.op("Gather", wide, outliers, axis=-1)
    left = e.cast(e.cast(e.op("Sub", e.op("Gather", ratio, outliers, axis=-1), again), dtype), "f32")
    return e.cast(e.op("Concat", wide, left, again, axis=-1), dtype)


def _turned(e: Emitter, n: Node, shift: str | None) -> str:
    """The rows less their shift and times a Hadamard matrix, block by block, where the node wants that."""
    size, shape = int(n.attr("hadamard", 1)), e.type(n.inputs[0]).shape  # type: ignore[arg-type]
    x = e.value(n.inputs[0])
    if shift is not None:
        x = e.op("Sub", x, e.value(shift))
    if size == 1:
        return x
    matrix = hadamard.rotate(np.eye(size, dtype=np.float32), size).T
    blocks = e.op("Reshape", x, e.ints(-1, *map(int, shape[1:-1]), size, int(shape[-1]) // size))
    turned = e.op("MatMul", e.const(matrix), blocks)
    return e.op("Reshape", turned, e.ints(-1, *map(int, shape[1:])))


def qlinear(e: Emitter, n: Node) -> Sequence[str]:
    given = operands(dict(n.attrs), n.inputs)
    row = scheme_of(dict(n.attrs))
    w = e.once(f"{e.value(given.parts[0])}/f32", lambda: widened(e, row, given.parts, e.value))
    x, shape = scaled_rows(e, row, given.x, given.row_scales), e.type(given.x).shape
    if len(shape) != 2:
        x = e.op("Reshape", x, e.ints(-1, int(shape[-1])))
    y = e.op("Gemm", x, w, transB=1)
    if len(shape) != 2:
        y = e.op("Reshape", y, e.ints(*(d if isinstance(d, int) else -1 for d in n.out.type.shape)))
    if given.row_scales and not row.by_group:
        y = e.op("Mul", y, e.op("Unsqueeze", e.value(given.row_scales), e.ints(-1)))
    return (e.op("Add", y, e.wide(given.bias)) if given.bias else y,)


def scaled_rows(e: Emitter, row: Scheme, x: str, scales: str | None) -> str:
    """The rows of a product in float32, times their scales where these are by group."""
    wide = e.wide(x)
    if scales is None or row.rows_group is None:
        return wide
    axis = len(e.type(x).shape) - 1
    each = np.arange(int(e.type(x).shape[-1])) // row.rows_group
    return e.op("Mul", wide, e.op("Gather", e.value(scales), e.const(each, "i32"), axis=axis))


def qembedding(e: Emitter, n: Node) -> Sequence[str]:
    row, ids = scheme_of(dict(n.attrs)), e.value(n.inputs[-1])
    taken = {}
    for i, name in enumerate(n.inputs[:-1]):
        axis = 1 if i and row.group is not None else 0
        taken[name] = e.op("Gather", gatherable(e, name), ids, axis=axis)
    return (widened(e, row, n.inputs[:-1], taken.__getitem__),)


def widened(e: Emitter, row: Scheme, parts: Sequence[str], take: Take) -> str:
    """float32 [N, K] of the parts of a matrix; `take` gives the ONNX value of a part."""
    codes, k = take(parts[0]), int(e.type(parts[0]).shape[-1])
    w = e.cast(codes, "i32" if row.name == "mxfp4" else "f32")
    if row.name == "mxfp4":
        w = e.op("Gather", e.const(E2M1), w)
    if row.zeros:
        w = e.op("Sub", w, _spread(e, row, _f32(e, parts[2], take), k))
    elif row.offset:
        w = e.op("Sub", w, e.const(float(row.offset)))
    return e.op("Mul", w, _spread(e, row, _f32(e, parts[1], take), k))


def _f32(e: Emitter, part: str, take: Take) -> str:
    """Scales and zero points may be bf16."""
    return take(part) if e.type(part).dtype == "f32" else e.cast(take(part), "f32")


def gatherable(e: Emitter, name: str) -> str:
    """A part in a dtype that ONNX gathers rows of."""
    return e.wide(name) if e.type(name).dtype in ("f8e4m3", "bf16") else e.value(name)


def _spread(e: Emitter, row: Scheme, scales: str, k: int) -> str:
    """[N] as a column, or [K/g, N] as [N, K]."""
    if row.group is None:
        return e.op("Unsqueeze", scales, e.ints(-1))
    groups = e.const(np.arange(k) // row.group, "i32")
    return e.op("Transpose", e.op("Gather", scales, groups, axis=0), perm=[1, 0])
