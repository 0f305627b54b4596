"""Type rules of ops along the last axis, of products of two activations and of experts."""

from planc.compiler.ir.infer import Attrs, Out, Types, as_int, broadcast, want
from planc.compiler.ir.operands import check_parts, check_rows, operands
from planc.compiler.ir.types import Dim, TensorType


def argmax(attrs: Attrs, types: Types) -> Out:
    """f32[.., N] gives i32[.., 1]."""
    want(types[0].dtype == "f32", f"argmax takes f32, got {types[0]}")
    return (TensorType("i32", (*types[0].shape[:-1], 1)),)


def topk(attrs: Attrs, types: Types) -> Out:
    """f32[.., N] gives (f32[.., k], i32[.., k])."""
    x, k = types[0], as_int(attrs["k"])
    want(x.dtype == "f32" and 0 < k <= int(x.shape[-1]), f"topk: {k} of {x}")
    shape = (*x.shape[:-1], k)
    return TensorType("f32", shape), TensorType("i32", shape)


def gather(attrs: Attrs, types: Types) -> Out:
    """x[.., N] and i32[.., K] give [.., K]; the axes before the last broadcast."""
    x, index = types
    want(index.dtype == "i32" and x.dtype in ("f32", "i32"), f"gather takes f32 or i32 and an index i32: {x}, {index}")
    return (TensorType(x.dtype, (*broadcast(x.shape[:-1], index.shape[:-1]), index.shape[-1])),)


def scatter(attrs: Attrs, types: Types) -> Out:
    """x f32[.., N], i32[.., K] and src f32[.., K] (or `scalar`) give f32[.., N]; the axes before the last broadcast."""
    x, index = types[:2]
    want(len(types) == 3 - ("scalar" in attrs), f"scatter takes a source or a scalar, got {len(types)} inputs")
    want(x.dtype == "f32" and index.dtype == "i32", f"scatter takes f32 and an index i32: {x}, {index}")
    want(all(t.dtype == "f32" and t.shape[-1] in (1, index.shape[-1]) for t in types[2:]), f"scatter: src {types[-1]}")
    return (TensorType("f32", (*broadcast(*(t.shape[:-1] for t in types)), x.shape[-1])),)


def matmul(attrs: Attrs, types: Types) -> Out:
    """a[.., M, K] @ b[.., K, N] = [.., M, N]; the axes before broadcast."""
    a, b = types
    want(
        a.dtype == b.dtype == "f32" and min(len(a.shape), len(b.shape)) >= 2, f"matmul takes f32 of two axes: {a}, {b}"
    )
    want(a.shape[-1] == b.shape[-2] and isinstance(b.shape[-2], int), f"matmul: {a} and {b} do not fit")
    want(isinstance(b.shape[-1], int), f"matmul: {b} would move the token axis")
    return (TensorType("f32", (*broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])),)


def expert_linear(attrs: Attrs, types: Types) -> Out:
    """x[T, K] or [T, k, K], ids i32[T, k] or [k] and w[E, N, K] (+ b[E, N]) give f32[T, k, N]."""
    w = types[2]
    _bias(attrs, types, 3, w.shape[:2])
    return (_experts(types[0], types[1], w),)


def qexpert_linear(attrs: Attrs, types: Types) -> Out:
    """Like expert_linear, with the parts of W[E, N, K] in place of w; codes and scales of the rows in place of x."""
    given = operands(attrs, types, experts=True)
    check_rows(attrs, given)
    check_parts(attrs, given.parts)
    codes = given.parts[0]
    _bias(attrs, given.others, 0, codes.shape[:2])
    assert given.ids is not None
    return (_experts(given.x, given.ids, codes),)


def _bias(attrs: Attrs, types: Types, at: int, shape: tuple[Dim, ...]) -> None:
    has = bool(attrs.get("bias", False))
    want(len(types) == at + has, f"expected {at + has} inputs with bias={has}, got {len(types)}")
    want(not has or types[at].shape == shape, f"bias of experts must have shape {shape}, got {types[at:]}")


def _experts(x: TensorType, ids: TensorType, w: TensorType) -> TensorType:
    want(len(w.shape) == 3 and x.shape[-1] == w.shape[2], f"expert_linear: x {x} does not fit w {w}")
    want(ids.dtype == "i32" and len(ids.shape) in (1, 2), f"expert_linear: ids must be i32[T, k] or i32[k], got {ids}")
    want(len(ids.shape) == 1 or ids.shape[0] == x.shape[0], f"expert_linear: ids {ids} do not match x {x}")
    k = ids.shape[-1]
    want(len(x.shape) == 2 or (len(x.shape) == 3 and x.shape[1] == k), f"expert_linear: x {x} has no {k} slots")
    return TensorType("f32", (x.shape[0], k, w.shape[1]))


def weighted_sum(attrs: Attrs, types: Types) -> Out:
    """y[T, k, N] and w[T, k] give [T, N]."""
    y, w = types
    want(len(y.shape) == 3 and w.shape == y.shape[:2] and y.dtype == w.dtype == "f32", f"weighted_sum: {y} by {w}")
    return (TensorType("f32", (y.shape[0], y.shape[2])),)
