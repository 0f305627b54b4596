"""Type rules of the op table: in go attributes and input types, out come output types or a ValueError."""

from collections.abc import Mapping, Sequence
from math import prod

from planc.compiler.ir.quant import SCHEMES
from planc.compiler.ir.types import Attr, Dim, TensorType

Attrs = Mapping[str, Attr]
Types = Sequence[TensorType]
Out = tuple[TensorType, ...]


def _want(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _ints(attr: Attr) -> tuple[int, ...]:
    if not isinstance(attr, tuple):
        raise ValueError(f"expected a tuple of ints, got {attr!r}")
    return attr


def _int(attr: Attr) -> int:
    if not isinstance(attr, int):
        raise ValueError(f"expected an int, got {attr!r}")
    return attr


def same(attrs: Attrs, types: Types) -> Out:
    """One output like the first input, dense."""
    return (TensorType(types[0].dtype, types[0].shape),)


def _broadcast(a: tuple[Dim, ...], b: tuple[Dim, ...]) -> tuple[Dim, ...]:
    n = max(len(a), len(b))
    out: list[Dim] = []
    for x, y in zip((1,) * (n - len(a)) + a, (1,) * (n - len(b)) + b, strict=True):
        _want(x == y or x == 1 or y == 1, f"shapes {a} and {b} do not broadcast")
        out.append(y if x == 1 else x)
    return tuple(out)


def binary(attrs: Attrs, types: Types) -> Out:
    """Two inputs that broadcast, or one input and the attribute `scalar`."""
    if "scalar" in attrs:
        _want(len(types) == 1, "a binary op with a scalar takes one input")
        return same(attrs, types)
    _want(len(types) == 2, f"expected two inputs, got {len(types)}")
    _want(types[0].dtype == types[1].dtype, f"dtypes differ: {types[0]} and {types[1]}")
    return (TensorType(types[0].dtype, _broadcast(types[0].shape, types[1].shape)),)


def cast(attrs: Attrs, types: Types) -> Out:
    """The first input in attribute `dtype`."""
    return (TensorType(str(attrs["dtype"]), types[0].shape),)


def reduce_last(attrs: Attrs, types: Types) -> Out:
    """The last axis becomes 1."""
    return (TensorType(types[0].dtype, (*types[0].shape[:-1], 1)),)


def reshape(attrs: Attrs, types: Types) -> Out:
    """`shape` with a leading -1 keeps the token axis; element counts of the rest must agree."""
    shape = _ints(attrs["shape"])
    x = types[0]
    if shape and shape[0] == -1:
        _want(prod(shape[1:]) == x.features, f"reshape {x} to {shape}: {x.features} elements a row do not fit")
        return (_view(x, (x.shape[0], *shape[1:]), x.strides()[0]),)
    _want(all(isinstance(d, int) for d in x.shape), f"reshape {x} to {shape} would move the token axis")
    _want(prod(shape) == prod(int(d) for d in x.shape), f"reshape {x} to {shape}: element counts differ")
    return (TensorType(x.dtype, shape),)


def _view(x: TensorType, shape: tuple[Dim, ...], row_stride: int) -> TensorType:
    """A reshaped view that keeps the distance between rows; the features of a row must lie densely."""
    dense = TensorType(x.dtype, x.shape).strides()
    _want(x.strides()[1:] == dense[1:], f"reshape of {x}: its rows have gaps, copy it first")
    out = TensorType(x.dtype, shape)
    strides = (row_stride, *out.strides()[1:])
    if strides == out.strides():
        return out
    _want(len(shape) > 1, f"reshape of {x} to {out}: the tokens lie apart, copy it first")
    return TensorType(x.dtype, shape, "strides:" + ",".join(str(s) for s in strides[:-1]))


def transpose(attrs: Attrs, types: Types) -> Out:
    """`perm` permutes the axes; a token axis must stay first."""
    perm, x = _ints(attrs["perm"]), types[0]
    _want(sorted(perm) == list(range(len(x.shape))), f"perm {perm} is no permutation of the axes of {x}")
    _want(isinstance(x.shape[0], int) or perm[0] == 0, f"transpose {perm} of {x} would move the token axis")
    return (TensorType(x.dtype, tuple(x.shape[p] for p in perm)),)


def slice_(attrs: Attrs, types: Types) -> Out:
    """`start:stop` of `axis`: a view when the input has a token axis (its layout keeps the parent's strides)."""
    axis, start, stop, x = _int(attrs["axis"]), _int(attrs["start"]), _int(attrs["stop"]), types[0]
    _want(0 <= axis < len(x.shape) and isinstance(x.shape[axis], int), f"slice axis {axis} of {x}")
    _want(0 <= start < stop <= int(x.shape[axis]), f"slice {start}:{stop} of axis {axis} of {x}")
    shape = (*x.shape[:axis], stop - start, *x.shape[axis + 1 :])
    if isinstance(x.shape[0], int) or shape == x.shape:
        return (TensorType(x.dtype, shape, x.layout if shape == x.shape else "row"),)
    view = TensorType(x.dtype, shape, "strides:" + ",".join(str(s) for s in x.strides()[:-1]))
    return (view if view.strides() != TensorType(x.dtype, shape).strides() else TensorType(x.dtype, shape),)


def concat(attrs: Attrs, types: Types) -> Out:
    """Inputs joined along `axis`; the others must agree."""
    axis = _int(attrs["axis"])
    first = types[0]
    for t in types[1:]:
        same_rest = all(a == b for i, (a, b) in enumerate(zip(first.shape, t.shape, strict=True)) if i != axis)
        _want(t.dtype == first.dtype and same_rest, f"concat along {axis}: {first} and {t} differ elsewhere")
    total = sum(int(t.shape[axis]) for t in types)
    return (TensorType(first.dtype, (*first.shape[:axis], total, *first.shape[axis + 1 :])),)


def take_rows(attrs: Attrs, types: Types) -> Out:
    """Rows of x[T, ...] by index i32[R]."""
    x, index = types
    _want(index.dtype in ("i32", "i64") and len(index.shape) == 1, f"row index must be i32[R], got {index}")
    return (TensorType(x.dtype, (index.shape[0], *x.shape[1:])),)


def embedding(attrs: Attrs, types: Types) -> Out:
    """table[N, ...] and ids i32[T] give f32[T, ...]."""
    table, ids = types
    _want(ids.dtype == "i32" and len(ids.shape) == 1, f"ids must be i32[T], got {ids}")
    return (TensorType("f32", (ids.shape[0], *table.shape[1:])),)


def qembedding(attrs: Attrs, types: Types) -> Out:
    """codes[N, K], scales[N] and ids i32[T] give f32[T, K]."""
    codes, scales, ids = types
    _scheme(attrs, codes, scales)
    return embedding(attrs, (codes, ids))


def _scheme(attrs: Attrs, codes: TensorType, scales: TensorType) -> None:
    want = SCHEMES[str(attrs["scheme"])].dtype
    _want(codes.dtype == want, f"scheme {attrs['scheme']} has codes of {want}, got {codes}")
    _want(
        scales == TensorType("f32", codes.shape[:1]), f"scales of {codes} must be f32[{codes.shape[0]}], got {scales}"
    )


def linear(attrs: Attrs, types: Types) -> Out:
    """x[..., K] @ w[N, K].T (+ b[N]) = f32[..., N]."""
    x, w = types[0], types[1]
    _want(len(w.shape) == 2 and x.shape[-1] == w.shape[1], f"linear: x {x} does not fit w {w}")
    _bias(attrs, types, 2, w.shape[0])
    return (TensorType("f32", (*x.shape[:-1], w.shape[0])),)


def _bias(attrs: Attrs, types: Types, at: int, n: Dim) -> None:
    has = bool(attrs.get("bias", False))
    _want(len(types) == at + has, f"expected {at + has} inputs with bias={has}, got {len(types)}")
    _want(not has or types[at].shape == (n,), f"bias must have shape ({n},), got {types[-1]}")


def qlinear(attrs: Attrs, types: Types) -> Out:
    """Like linear, with codes[N, K] and scales[N] in place of w."""
    _scheme(attrs, types[1], types[2])
    _bias(attrs, types, 3, types[1].shape[0])
    return linear({}, types[:2])


def add_norm(attrs: Attrs, types: Types) -> Out:
    """x and y of one shape (then norm parameters) give (normed, sum)."""
    _want(types[0].shape == types[1].shape, f"add_norm: {types[0]} and {types[1]} differ")
    out = TensorType(types[0].dtype, types[0].shape)
    return (out, out)


def act_mul(attrs: Attrs, types: Types) -> Out:
    """act(gate) * up, both of one shape."""
    _want(types[0].shape == types[1].shape, f"act_mul: {types[0]} and {types[1]} differ")
    return same(attrs, types)


def rotary(attrs: Attrs, types: Types) -> Out:
    """x[T, heads, D], cos and sin f32[max_len, R/2] with R <= D, positions i32[T]; the result is dense."""
    x, cos, sin, positions = types
    _want(len(x.shape) == 3, f"rotary: x must be [T, heads, D], got {x}")
    _want(cos.shape == sin.shape and len(cos.shape) == 2, f"rotary: tables {cos} and {sin} differ")
    _want(2 * int(cos.shape[1]) <= int(x.shape[2]), f"rotary: table {cos} is wider than half of {x}")
    _want(positions.shape == x.shape[:1], f"rotary: positions {positions} do not match {x}")
    return same(attrs, types)


def attention(attrs: Attrs, types: Types) -> Out:
    """q[T, Hq, D], k[T, Hk, D], v[T, Hk, Dv] (, sinks[Hq]) give [T, Hq, Dv]; all tokens are one sequence."""
    q, k, v = types[:3]
    _want(all(len(t.shape) == 3 for t in (q, k, v)), f"attention takes [T, heads, D], got {q}, {k}, {v}")
    _want(k.shape[:2] == v.shape[:2] and q.shape[2] == k.shape[2], f"attention: {q}, {k}, {v} do not fit")
    _want(int(q.shape[1]) % int(k.shape[1]) == 0, f"attention: {q.shape[1]} query heads over {k.shape[1]} KV heads")
    _mask(attrs)
    has = bool(attrs.get("sinks", False))
    _want(len(types) == 3 + has, f"attention: expected {3 + has} inputs with sinks={has}, got {len(types)}")
    return (TensorType("f32", (*q.shape[:2], v.shape[2])),)


def _mask(attrs: Attrs) -> None:
    kind, window = attrs["kind"], _int(attrs["window"])
    _want(kind in ("causal", "sliding", "chunked"), f"unknown mask kind {kind!r}")
    _want((kind == "causal") == (window == 0), f"mask {kind} with window {window}")


def kv_append(attrs: Attrs, types: Types) -> Out:
    """k[T, heads, k_dim], v[T, heads, v_dim], slots i32[T] and the cache: no output, the cache changes."""
    k, v, slots, kv = types
    for t, dim in ((k, attrs["k_dim"]), (v, attrs["v_dim"])):
        _want(t.shape[1:] == (attrs["heads"], dim), f"kv_append: {t} is not [T, {attrs['heads']}, {dim}]")
    _want(slots.shape == k.shape[:1] and kv.dtype == "u8", f"kv_append: slots {slots}, cache {kv}")
    return ()


def paged(attrs: Attrs, types: Types) -> Out:
    """q[T, Hq, D], cache, page_table, query_start, positions (, sinks[Hq]) give [T, Hq, v_dim]."""
    q, kv, table, start, positions = types[:5]
    _want(q.shape[2] == attrs["k_dim"], f"paged_attention: {q} does not fit k_dim {attrs['k_dim']}")
    _want(int(q.shape[1]) % _int(attrs["heads"]) == 0, f"paged_attention: {q} over {attrs['heads']} KV heads")
    _want(table.shape[0] == "S" and start.shape == ("S1",), f"paged_attention: table {table}, query_start {start}")
    _want(kv.dtype == "u8" and positions.shape == q.shape[:1], f"paged_attention: cache {kv}, positions {positions}")
    _mask(attrs)
    _want(len(types) == 5 + bool(attrs.get("sinks", False)), f"paged_attention: {len(types)} inputs")
    return (TensorType("f32", (*q.shape[:2], _int(attrs["v_dim"]))),)
