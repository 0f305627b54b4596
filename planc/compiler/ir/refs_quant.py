"""Numpy references of products with quantized weights, and of rounding the rows that they multiply."""

from collections.abc import Sequence

import numpy as np

from planc.compiler.ir.operands import Operands, operands, rounding, scheme_of
from planc.compiler.ir.quant import quantize_rows as rounded
from planc.compiler.ir.refs import Array, Attrs, Out, Types, logical
from planc.compiler.ir.refs_experts import choose
from planc.compiler.ir.types import TensorType


def quantize_rows(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """Codes and scales of the rows of x; see planc.compiler.ir.quant.quantize_rows."""
    size = int(attrs.get("hadamard", 1))  # type: ignore[arg-type]
    x, shift, outliers = rounding(args, types)
    return rounded(x, str(attrs["dtype"]), size, shift, outliers, attrs.get("group"))  # type: ignore[arg-type]


def qembedding(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """Rows of the table that the parts stand for."""
    row, ids = scheme_of(attrs), args[-1]
    q, *rest = args[:-1]
    parts = [p[ids] if row.group is None else p[:, ids] for p in rest]
    return (row.dequantize(logical(q, types[0])[ids], *parts),)


def qlinear(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    given = operands(attrs, args)
    y = _multiplied(attrs, given) @ _weight(attrs, given, operands(attrs, types)).T
    return (_finished(y, _scales_left(attrs, given), given.bias),)


def qexpert_linear(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """y[t, j] = x[t, (j)] @ w[ids[t, j]].T (+ b[ids[t, j]]); an id outside of the experts gives zeros."""
    given = operands(attrs, args, experts=True)
    assert given.ids is not None
    w = _weight(attrs, given, operands(attrs, types, experts=True))
    x = _multiplied(attrs, given)
    y = choose(x, given.ids, w, None)
    scales = _scales_left(attrs, given)
    if scales is not None and scales.ndim == 1:
        scales = scales[:, None]
    bias = None if given.bias is None else choose(np.zeros_like(x), given.ids, w, given.bias)
    return (_finished(y, scales, bias),)


def _multiplied(attrs: Attrs, given: Operands[Array]) -> Array:
    """The rows in float64 where they are codes, whose products are then exact; times their scales by group."""
    if given.row_scales is None:
        return given.x.astype(np.float32)
    group = scheme_of(attrs).rows_group
    wide = given.x.astype(np.float64)
    return wide if group is None else wide * np.repeat(given.row_scales, group, axis=-1)


def _scales_left(attrs: Attrs, given: Operands[Array]) -> Array | None:
    """The scales of rows that their products lack."""
    return None if scheme_of(attrs).by_group else given.row_scales


def _weight(attrs: Attrs, given: Operands[Array], types: Operands[TensorType]) -> Array:
    q, *rest = given.parts
    return scheme_of(attrs).dequantize(logical(q, types.parts[0]), *rest)


def _finished(y: Array, scales: Array | None, bias: Array | None) -> Array:
    if scales is not None:
        y = y * scales[..., None]
    return np.asarray(y if bias is None else y + bias, np.float32)
