"""Sample rows of every op: in goes an op's name, out come attributes and input arrays with their types."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from planc.compiler.ir.packing import pack
from planc.compiler.ir.quant import SCHEMES, Scheme, quantize_rows
from planc.compiler.ir.refs import BINARY, COMPARE, REDUCE, UNARY
from planc.compiler.ir.types import Attr, TensorType, dtype_name

RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Sample:
    """One call of an op. `token` marks the inputs whose first axis is the token axis."""

    op: str
    args: tuple[np.ndarray, ...]
    attrs: dict[str, Attr] = field(default_factory=dict)
    tokens: tuple[bool, ...] = ()
    layouts: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...] | None, ...] = ()

    def types(self) -> list[TensorType]:
        out = []
        for i, a in enumerate(self.args):
            shape = self.shapes[i] if i < len(self.shapes) and self.shapes[i] else a.shape
            layout = self.layouts[i] if i < len(self.layouts) else "row"
            token = self.tokens[i] if i < len(self.tokens) else False
            dtype = "u4" if a.dtype == np.uint8 else dtype_name(a.dtype)  # no op takes other bytes
            out.append(TensorType(dtype, ("T", *shape[1:]) if token else shape, layout))
        return out


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def positive(*shape: int) -> np.ndarray:
    return RNG.uniform(0.5, 2.0, shape).astype(np.float32)


def special(*shape: int) -> np.ndarray:
    """Whole numbers and halves, so that equals abound, with NaN and infinities among them."""
    x = (RNG.integers(-6, 7, shape) / 2).astype(np.float32)
    flat = x.reshape(-1)
    flat[RNG.integers(0, flat.size, 6)] = [np.nan, np.inf, -np.inf, -0.0, np.nan, np.inf]
    return x


def samples() -> Iterator[Sample]:
    x, y = normal(5, 3, 8), normal(5, 3, 8)
    ids = np.array([3, 0, 6, 6, 2], np.int32)
    for name in UNARY:
        yield Sample(
            name, (positive(5, 8) if name in ("log", "sqrt", "rsqrt", "log1p") else normal(5, 8),), tokens=(True,)
        )
    for name in BINARY:
        a = positive(5, 3, 8)
        yield Sample(name, (a, y), tokens=(True, True))
        yield Sample(name, (a, normal(8)), tokens=(True, False))
        yield Sample(name, (a, normal(5, 1, 8)), tokens=(True, True))
        yield Sample(name, (a,), {"scalar": 1.5}, tokens=(True,))
        yield Sample(name, (a,), {"scalar": 1.5, "reversed": True}, tokens=(True,))
    for name in REDUCE:
        yield Sample(name, (x,), tokens=(True,))
    yield from _pointwise()
    yield from _rows()
    yield from _expand()
    yield Sample("gelu", (x,), {"tanh": True}, tokens=(True,))
    yield Sample("gelu", (x,), {"tanh": False}, tokens=(True,))
    yield Sample("cast", (ids,), {"dtype": "f32"}, tokens=(True,))
    yield Sample("cast", (x,), {"dtype": "bf16"}, tokens=(True,))
    yield Sample("reshape", (x,), {"shape": (-1, 4, 6)}, tokens=(True,))
    yield Sample("reshape", (normal(4, 6),), {"shape": (3, 8)})
    yield Sample("transpose", (x,), {"perm": (0, 2, 1)}, tokens=(True,))
    yield Sample("transpose", (normal(4, 6),), {"perm": (1, 0)})
    yield Sample("slice", (x,), {"axis": 2, "start": 2, "stop": 7}, tokens=(True,))
    yield Sample("slice", (normal(4, 6),), {"axis": 0, "start": 1, "stop": 3})
    yield Sample("concat", (x, y), {"axis": 2}, tokens=(True, True))
    yield Sample("concat", (normal(4, 6), normal(2, 6)), {"axis": 0})
    yield Sample("copy", (x,), tokens=(True,))
    yield Sample("take_rows", (x, np.array([4, 1], np.int32)), tokens=(True, False))
    yield Sample("embedding", (normal(7, 8), ids), tokens=(False, True))
    yield Sample("linear", (normal(5, 8), normal(6, 8)), tokens=(True, False))
    yield Sample("linear", (normal(5, 8), normal(6, 8), normal(6)), {"bias": True}, tokens=(True, False, False))
    yield Sample("linear_act_mul", (normal(5, 8), normal(6, 8)), {"act": "silu"}, tokens=(True, False))
    biased = (normal(5, 8), normal(6, 8), normal(6))
    yield Sample("linear_act_mul", biased, {"act": "gelu", "bias": True}, tokens=(True, False, False))
    yield from _packed(ids)
    yield from _quantized(ids)
    yield Sample("rms_norm", (x, normal(8)), {"eps": 1e-5}, tokens=(True,))
    yield Sample("rms_norm", (x,), {"eps": 1e-5}, tokens=(True,))
    yield Sample("layer_norm", (x, normal(8), normal(8)), {"eps": 1e-5, "bias": True}, tokens=(True,))
    yield Sample("layer_norm", (x, normal(8)), {"eps": 1e-5}, tokens=(True,))
    yield Sample("layer_norm", (x,), {"eps": 1e-5}, tokens=(True,))
    yield Sample("add_rms_norm", (x, y, normal(8)), {"eps": 1e-5}, tokens=(True, True))
    layer = (x, y, normal(8), normal(8))
    yield Sample("add_layer_norm", layer, {"eps": 1e-5, "bias": True}, tokens=(True, True))
    for act in ("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh", "relu2"):
        yield Sample("act_mul", (x, y), {"act": act}, tokens=(True, True))
    yield from _rotary(ids)
    yield from _attention()
    yield from _products()
    yield from _experts()
    yield Sample("all_reduce", (x, y, normal(5, 3, 8)), {"ranks": 3}, tokens=(True, True, True))
    shared = normal(5, 8)
    parts = (shared[:, :3], shared[:, 3:6], shared[:, 5:])
    yield Sample("all_gather", parts, {"ranks": 3, "starts": (0, 3, 5), "size": 8}, tokens=(True, True, True))


def _pointwise() -> Iterator[Sample]:
    for name in ("sign", "round", "ceil", "trunc", "floor"):
        yield Sample(name, (special(5, 8),), tokens=(True,))
    for name in ("expm1", "log1p"):
        yield Sample(name, (normal(5, 8) * np.float32(1e-4),), tokens=(True,))
    whole = RNG.integers(-9, 10, (5, 8)).astype(np.int32)
    parts = RNG.integers(1, 5, (5, 8)).astype(np.int32) * np.int32([1, -1] * 4)
    for name in COMPARE:
        yield Sample(name, (special(5, 8), special(5, 8)), tokens=(True, True))
        yield Sample(name, (special(5, 8),), {"scalar": 0.5}, tokens=(True,))
        yield Sample(name, (special(5, 8),), {"scalar": 0.5, "reversed": True}, tokens=(True,))
        yield Sample(name, (whole, parts), tokens=(True, True))
        yield Sample(name, (whole,), {"scalar": 1.5}, tokens=(True,))
    for name in ("remainder", "floor_divide"):
        yield Sample(name, (whole, parts), tokens=(True, True))
        yield Sample(name, (whole,), {"scalar": -4}, tokens=(True,))
        yield Sample(name, (special(5, 8), special(5, 8)), tokens=(True, True))
        yield Sample(name, (special(5, 8),), {"scalar": 1.5, "reversed": True}, tokens=(True,))
    yield Sample("where", (special(5, 1), normal(5, 8), special(8)), tokens=(True, True, False))
    yield Sample("where", (special(5, 8), whole, parts), tokens=(True, True, True))
    code = "mul(i0,0.5);gelu_tanh(t0);gt(t1,i1);where(t2,t1,-inf);maximum(t3,i2);gelu(t4)"
    yield Sample("fused", (normal(5, 3, 8), normal(5, 1, 1), normal(8)), {"code": code}, tokens=(True, True, False))
    yield Sample("fused", (normal(5, 8), normal(5, 8)), {"code": "mul(i0,i1)"}, tokens=(True, True))


def _rows() -> Iterator[Sample]:
    x = special(7, 3, 9)
    bare = np.full((4, 6), -np.inf, np.float32)
    bare[0, 2] = 1
    yield Sample("amin", (x,), tokens=(True,))
    yield Sample("softmax", (normal(5, 3, 8) * 20,), tokens=(True,))
    yield Sample("softmax", (bare,), tokens=(True,))
    yield Sample("softmax", (x,), tokens=(True,))
    yield Sample("cumsum", (x,), tokens=(True,))
    yield Sample("argmax", (x,), tokens=(True,))
    for largest in (True, False):
        yield Sample("topk", (normal(5, 8),), {"k": 3, "largest": largest}, tokens=(True,))
        yield Sample("topk", (x,), {"k": 9, "largest": largest}, tokens=(True,))
    index = RNG.integers(0, 9, (7, 3, 4)).astype(np.int32)
    yield Sample("gather", (x, index), tokens=(True, True))
    yield Sample("gather", (normal(1, 9), index[:, 0]), tokens=(False, True))
    yield Sample("gather", (index, index[:, :1] % 4), tokens=(True, True))
    apart = np.argsort(normal(7, 3, 9), -1)[..., :4].astype(np.int32)
    yield Sample("scatter", (x, apart, normal(7, 3, 4)), tokens=(True, True, True))
    yield Sample("scatter", (normal(1, 1, 9), apart), {"scalar": -1.5}, tokens=(False, True))
    yield Sample("scatter", (normal(7, 3, 9), index, normal(7, 3, 4)), {"add": True}, tokens=(True, True, True))


def _expand() -> Iterator[Sample]:
    yield Sample("expand", (normal(5, 1, 4),), {"shape": (-1, 3, 4)}, tokens=(True,))
    yield Sample("expand", (normal(1, 4),), {"shape": (3, 4)})
    yield Sample("expand", (normal(1, 4),), {"shape": (-1, 4), "rows": "T", "length": 5})


def _products() -> Iterator[Sample]:
    yield Sample("matmul", (normal(5, 2, 3, 8), normal(5, 1, 8, 4)), tokens=(True, True))
    yield Sample("matmul", (normal(5, 3, 8), normal(8, 4)), tokens=(True, False))
    yield Sample("matmul", (normal(5, 8), normal(8, 4)), tokens=(True, False))
    yield Sample("weighted_sum", (normal(5, 3, 8), normal(5, 3)), tokens=(True, True))


def _experts() -> Iterator[Sample]:
    w, bias = normal(4, 70, 9), normal(4, 70)
    picks = RNG.integers(-1, 5, (5, 2)).astype(np.int32)  # -1 and 4 are no experts
    scheme = SCHEMES["int8-wo"]
    q, s = scheme.part(w, "q"), scheme.part(w, "s")
    three = (True, True, False)
    for x in (normal(5, 9), normal(5, 2, 9)):
        yield Sample("expert_linear", (x, picks, w), tokens=three)
        yield Sample("expert_linear", (x, picks, w, bias), {"bias": True}, three)
        yield Sample("qexpert_linear", (x, picks, q, s), {"scheme": "int8-wo"}, three)
    every = np.arange(4, dtype=np.int32)
    yield Sample("expert_linear", (normal(5, 9), every, w), tokens=(True,))
    layouts, shapes = ("row", "row", "n64"), (None, None, w.shape)
    yield Sample("expert_linear", (normal(5, 9), picks, pack(w, "n64")), {}, three, layouts, shapes)
    args = (normal(5, 9), picks, pack(q, "n64u4"), s, bias)
    layouts = ("row", "row", "n64u4")
    yield Sample("qexpert_linear", args, {"scheme": "int8-wo", "bias": True}, three, layouts, shapes)


def _packed(ids: np.ndarray) -> Iterator[Sample]:
    w = normal(70, 9)
    packed, shapes = pack(w, "n64"), (None, (70, 9))
    yield Sample("linear", (normal(5, 9), packed), {}, (True, False), ("row", "n64"), shapes)
    yield Sample("embedding", (packed, ids), {}, (False, True), ("n64",), ((70, 9),))
    scheme = SCHEMES["int8-wo"]
    q, s = scheme.part(w, "q"), scheme.part(w, "s")
    attrs: dict[str, Attr] = {"scheme": "int8-wo"}
    yield Sample("qlinear", (normal(5, 9), q, s), attrs, (True, False, False))
    yield Sample("qlinear", (normal(5, 9), q, s, normal(70)), {**attrs, "bias": True}, (True, False, False, False))
    yield Sample("qembedding", (q, s, ids), attrs, (False, False, True))


def made(row: Scheme, w: np.ndarray) -> tuple[np.ndarray, ...]:
    """The parts of a weight; codes alone for a scheme that only checkpoints hold."""
    if not row.read_only:
        return tuple(row.part(w, part) for part in row.parts)
    shape = row.part_type(TensorType("f32", w.shape), "s").shape
    low, high, dtype, most = (0, 16, np.uint8, 3) if row.codes == "u4" else (-128, 128, np.int8, -2)
    parts = [
        RNG.integers(low, high, w.shape).astype(dtype),
        np.exp2(RNG.integers(most - 7, most, shape)).astype(np.float32),
        RNG.uniform(-3, 18, shape).astype(np.float32),
    ]
    return tuple(parts[: len(row.parts)])


def rows(row: Scheme, x: np.ndarray) -> tuple[np.ndarray, ...]:
    """What the scheme multiplies in the place of x."""
    return quantize_rows(x, row.act, group=row.rows_group) if row.act else (x,)


def _quantized(ids: np.ndarray) -> Iterator[Sample]:
    for dtype in ("i8", "f8e4m3"):
        yield Sample("quantize_rows", (normal(5, 9),), {"dtype": dtype}, (True,))
        yield Sample("quantize_rows", (normal(5, 2, 9),), {"dtype": dtype}, (True,))
    yield Sample("quantize_rows", (normal(5, 2, 12),), {"dtype": "i8", "group": 4}, (True,))
    outliers = np.array([1, 4, 8], np.int32)
    yield Sample("quantize_rows", (normal(5, 9), outliers), {"dtype": "f8e4m3"}, (True, False))
    yield Sample("quantize_rows", (normal(5, 2, 9), normal(9), outliers), {"dtype": "f8e4m3"}, (True, False, False))
    yield from _made_and_rounded(outliers)
    for row in SCHEMES.values():
        k = 256 if row.by_group else 192  # rows have whole groups
        parts, lead = made(row, normal(70, k)), 2 if row.act else 1
        attrs: dict[str, Attr] = {"scheme": row.name}
        yield Sample("qlinear", (*rows(row, normal(5, k)), *parts), attrs, (True,) * lead)
        small = normal(5, k) * np.float32(0.02)  # gates that cancel would show each rounding of the sums
        yield Sample("qlinear_act_mul", (*rows(row, small), *parts), {**attrs, "act": "silu"}, (True,) * lead)
        yield Sample("qlinear", (*rows(row, normal(5, k)), *parts, normal(70)), {**attrs, "bias": True}, (True,) * lead)
        yield Sample("qembedding", (*parts, ids), attrs, (*[False] * len(parts), True))
        picks, stack = RNG.integers(-1, 4, (5, 2)).astype(np.int32), made(row, normal(3, 70, k))
        for x in (normal(5, k), normal(5, 2, k)):
            given = (*rows(row, x), picks, *stack)
            yield Sample("qexpert_linear", given, attrs, (True,) * (lead + 1))
            yield Sample("qexpert_linear", (*given, normal(3, 70)), {**attrs, "bias": True}, (True,) * (lead + 1))


def _made_and_rounded(outliers: np.ndarray) -> Iterator[Sample]:
    """Rows that are rounded where they are made: inputs of the first op, then a shift, outliers."""
    x, y, w = normal(5, 2, 8), normal(5, 2, 8), normal(8)
    norm: dict[str, Attr] = {"eps": 1e-5, "dtype": "i8"}
    fp8: dict[str, Attr] = {"eps": 1e-5, "dtype": "f8e4m3", "shift": True}
    yield Sample("rms_norm_quantize", (x, w), norm, (True,))
    yield Sample("rms_norm_quantize", (x,), norm, (True,))
    yield Sample("rms_norm_quantize", (x, normal(8)), {**norm, "shift": True}, (True,))
    yield Sample("layer_norm_quantize", (x, w, normal(8)), {**norm, "bias": True}, (True,))
    yield Sample("add_rms_norm_quantize", (x, y, w, normal(8), outliers - 1), fp8, (True, True))
    yield Sample("add_layer_norm_quantize", (x, y, w, normal(8), normal(8)), {**fp8, "bias": True}, (True, True))
    for act in ("silu", "gelu_tanh"):
        yield Sample("act_mul_quantize", (x, y), {"act": act, "dtype": "i8"}, (True, True))
    yield Sample("act_mul_quantize", (x, y, outliers - 1), {"act": "silu", "dtype": "f8e4m3"}, (True, True))


def _rotary(ids: np.ndarray) -> Iterator[Sample]:
    for half, interleaved in ((4, False), (4, True), (3, False), (3, True)):
        args = (normal(5, 2, 8), normal(9, half), normal(9, half), ids)
        yield Sample("rotary", args, {"interleaved": interleaved}, (True, False, False, True))


MASKS: list[dict[str, Attr]] = [
    {"kind": "causal", "window": 0},
    {"kind": "sliding", "window": 3},
    {"kind": "chunked", "window": 4},
]


def _attention() -> Iterator[Sample]:
    for mask in MASKS:
        for cap in (0.0, 5.0):
            attrs: dict[str, Attr] = {"scale": 0.3, "softcap": cap, "layer": 0, **mask}
            qkv = (normal(9, 6, 8), normal(9, 2, 8), normal(9, 2, 5))
            yield Sample("attention", qkv, attrs, (True, True, True))
            yield Sample("attention", (*qkv, normal(6)), {**attrs, "sinks": True}, (True, True, True, False))
            yield Sample("attention", (*qkv, normal(6)), {**attrs, "alibi": True}, (True, True, True, False))
            both = {**attrs, "sinks": True, "alibi": True}
            yield Sample("attention", (*qkv, normal(6), normal(6)), both, (True, True, True, False, False))
