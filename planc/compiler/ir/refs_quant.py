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
    return rounded(x, str(attrs["dtype"]), size, shift, outliers)


def qembedding(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """Rows of the table that the parts stand for."""
    row, ids = scheme_of(attrs), args[-1]
    q, *rest = args[:-1]
    parts = [p[ids] if row.group is None else p[:, ids] for p in rest]
    return (row.dequantize(logical(q, types[0])[ids], *parts),)


def qlinear(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    given = operands(attrs, args)
    y = _multiplied(given) @ _weight(attrs, given, operands(attrs, types)).T
    return (_finished(y, given.row_scales, given.bias),)


def qexpert_linear(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """y[t, j] = x[t, (j)] @ w[ids[t, j]].T (+ b[ids[t, j]]); an id outside of the experts gives zeros."""
    given = operands(attrs, args, experts=True)
    assert given.ids is not None
    w = _weight(attrs, given, operands(attrs, types, experts=True))
    y = choose(_multiplied(given), given.ids, w, None)
    scales = given.row_scales
    if scales is not None and scales.ndim == 1:
        scales = scales[:, None]
    bias = None if given.bias is None else choose(np.zeros_like(_multiplied(given)), given.ids, w, given.bias)
    return (_finished(y, scales, bias),)


def _multiplied(given: Operands[Array]) -> Array:
    """The rows in float64 where they are codes: products of codes are then exact."""
    return given.x.astype(np.float32 if given.row_scales is None else np.float64)


def _weight(attrs: Attrs, given: Operands[Array], types: Operands[TensorType]) -> Array:
    q, *rest = given.parts
    return scheme_of(attrs).dequantize(logical(q, types.parts[0]), *rest)


def _finished(y: Array, scales: Array | None, bias: Array | None) -> Array:
    if scales is not None:
        y = y * scales[..., None]
    return np.asarray(y if bias is None else y + bias, np.float32)
