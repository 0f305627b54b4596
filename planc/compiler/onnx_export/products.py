"""Linear layers, products of activations, norms and rotary positions, as ONNX."""

from collections.abc import Sequence
from typing import Any

from planc.compiler.ir.graph import Node
from planc.compiler.onnx_export.emitter import Emitter


def linear(e: Emitter, n: Node) -> Sequence[str]:
    return (_gemm(e, n, e.wide(n.inputs[1]), n.inputs[2:]),)


def _gemm(e: Emitter, n: Node, w: str, bias: Sequence[str]) -> str:
    """x @ w.T (+ b); Gemm takes a matrix, so other axes are folded and unfolded around it."""
    x, shape = e.value(n.inputs[0]), e.type(n.inputs[0]).shape
    if len(shape) != 2:
        x = e.op("Reshape", x, e.ints(-1, int(shape[-1])))
    y = e.op("Gemm", x, w, *(e.wide(b) for b in bias), transB=1)
    if len(shape) == 2:
        return y
    return e.op("Reshape", y, e.ints(*(d if isinstance(d, int) else -1 for d in n.out.type.shape)))


def matmul(e: Emitter, n: Node) -> Sequence[str]:
    return (e.op("MatMul", *(e.value(i) for i in n.inputs)),)


def weighted_sum(e: Emitter, n: Node) -> Sequence[str]:
    """[T, 1, k] @ [T, k, N]."""
    y, w = (e.value(i) for i in n.inputs)
    return (e.op("Squeeze", e.op("MatMul", e.op("Unsqueeze", w, e.ints(1)), y), e.ints(1)),)


def rms_norm(e: Emitter, n: Node) -> Sequence[str]:
    return (_rms(e, n, e.value(n.inputs[0]), n.inputs[1:]),)


def add_rms_norm(e: Emitter, n: Node) -> Sequence[str]:
    total = e.op("Add", *(e.value(i) for i in n.inputs[:2]))
    return _rms(e, n, total, n.inputs[2:]), total


def _rms(e: Emitter, n: Node, x: str, params: Sequence[str]) -> str:
    mean = e.op("ReduceMean", e.op("Pow", x, e.const(2.0)), e.ints(-1), keepdims=1)
    y = e.op("Div", x, e.op("Sqrt", e.op("Add", mean, e.const(n.attr("eps")))))
    return e.op("Mul", y, e.wide(params[0])) if params else y


def layer_norm(e: Emitter, n: Node) -> Sequence[str]:
    return (_layer(e, n, e.value(n.inputs[0]), n.inputs[1:]),)


def add_layer_norm(e: Emitter, n: Node) -> Sequence[str]:
    total = e.op("Add", *(e.value(i) for i in n.inputs[:2]))
    return _layer(e, n, total, n.inputs[2:]), total


def _layer(e: Emitter, n: Node, x: str, params: Sequence[str]) -> str:
    """LayerNormalization wants a weight of one axis; another, or none, leaves it a weight of ones."""
    size = int(n.out.type.shape[-1])
    has_bias = bool(dict(n.attrs).get("bias"))
    rest = [e.wide(p) for p in params]
    if rest and all(e.type(p).shape == (size,) for p in params) and len(rest) == 1 + has_bias:
        return e.op("LayerNormalization", x, *rest, axis=-1, epsilon=n.attr("eps"))
    y = e.op("LayerNormalization", x, e.const([1.0] * size), axis=-1, epsilon=n.attr("eps"))
    if len(rest) > has_bias:
        y = e.op("Mul", y, rest[0])
    return e.op("Add", y, rest[-1]) if has_bias else y


def rotary(e: Emitter, n: Node) -> Sequence[str]:
    """Pairs (a, b) -> (a cos - b sin, b cos + a sin), of halves or of neighbours; what is beyond them stays."""
    x, cos, sin, positions = n.inputs
    half, width = int(e.type(cos).shape[1]), int(e.type(x).shape[2])
    c, s = (_angles(e, table, positions) for table in (cos, sin))
    rest = [width - 2 * half] if width > 2 * half else []
    if not n.attr("interleaved"):
        a, b, *kept = e.ops("Split", 2 + len(rest), e.value(x), e.ints(half, half, *rest), axis=-1)
        return (e.op("Concat", *_turn(e, a, b, c, s), *kept, axis=-1),)
    turned, *kept = e.ops("Split", 2, e.value(x), e.ints(2 * half, *rest), axis=-1) if rest else [e.value(x)]
    heads: Any = e.type(x).shape[1]
    pairs = e.op("Reshape", turned, e.ints(0, heads, half, 2))
    a, b = (e.op("Squeeze", p, e.ints(-1)) for p in e.ops("Split", 2, pairs, e.ints(1, 1), axis=-1))
    joined = e.op("Concat", *(e.op("Unsqueeze", p, e.ints(-1)) for p in _turn(e, a, b, c, s)), axis=-1)
    y = e.op("Reshape", joined, e.ints(0, heads, 2 * half))
    return (e.op("Concat", y, *kept, axis=-1) if kept else y,)


def _angles(e: Emitter, table: str, positions: str) -> str:
    """[T, 1, R/2]: the table's rows of this call, the same for every layer."""
    at = e.value(positions)
    rows = e.wide(table)
    return e.once(f"{e.value(table)}/{at}", lambda: e.op("Unsqueeze", e.op("Gather", rows, at), e.ints(1)), common=True)


def _turn(e: Emitter, a: str, b: str, c: str, s: str) -> tuple[str, str]:
    first = e.op("Sub", e.op("Mul", a, c), e.op("Mul", b, s))
    return first, e.op("Add", e.op("Mul", b, c), e.op("Mul", a, s))
