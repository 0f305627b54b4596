"""Type rules of the op table: in go attributes and input types, out come output types or a ValueError."""

from collections.abc import Mapping, Sequence
from math import prod

from planc.compiler.ir.operands import check_parts, check_rows, operands
from planc.compiler.ir.types import Attr, Dim, TensorType

Attrs = Mapping[str, Attr]
Types = Sequence[TensorType]
Out = tuple[TensorType, ...]


def want(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def as_ints(attr: Attr) -> tuple[int, ...]:
    if not isinstance(attr, tuple):
        raise ValueError(f"expected a tuple of ints, got {attr!r}")
    return attr


def as_int(attr: Attr) -> int:
    if not isinstance(attr, int):
        raise ValueError(f"expected an int, got {attr!r}")
    return attr


def same(attrs: Attrs, types: Types) -> Out:
    """One output like the first input, dense."""
    return (TensorType(types[0].dtype, types[0].shape),)


def broadcast(*shapes: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """The shape that all broadcast to, aligned at the last axis; ValueError when there is none."""
    n = max(map(len, shapes))
    out: list[Dim] = [1] * n
    for shape in shapes:
        for i, d in enumerate(shape, n - len(shape)):
            want(d == out[i] or d == 1 or out[i] == 1, f"shapes {', '.join(map(str, shapes))} do not broadcast")
            out[i] = d if out[i] == 1 else out[i]
    return tuple(out)


def binary(attrs: Attrs, types: Types) -> Out:
    """Two inputs that broadcast, or one input and the attribute `scalar`."""
    if "scalar" in attrs:
        want(len(types) == 1, "a binary op with a scalar takes one input")
        return same(attrs, types)
    want(len(types) == 2, f"expected two inputs, got {len(types)}")
    want(types[0].dtype == types[1].dtype, f"dtypes differ: {types[0]} and {types[1]}")
    return (TensorType(types[0].dtype, broadcast(types[0].shape, types[1].shape)),)


def compare(attrs: Attrs, types: Types) -> Out:
    """Like `binary`; the result is f32, 1.0 or 0.0."""
    (made,) = binary(attrs, types)
    want(made.dtype in ("f32", "i32"), f"a comparison takes f32 or i32, got {made}")
    return (TensorType("f32", made.shape),)


def where(attrs: Attrs, types: Types) -> Out:
    """A condition of f32 and two values of one dtype that broadcast."""
    c, a, b = types
    want(
        c.dtype == "f32" and a.dtype == b.dtype in ("f32", "i32"),
        f"where takes f32 and two of one dtype: {c}, {a}, {b}",
    )
    return (TensorType(a.dtype, broadcast(c.shape, a.shape, b.shape)),)


def expand(attrs: Attrs, types: Types) -> Out:
    """`shape`, of which x has 1 where it differs; a leading -1 is the token axis, with `rows` a new one."""
    shape, x = as_ints(attrs["shape"]), types[0]
    want(len(shape) == len(x.shape), f"expand {x} to {shape}: the numbers of axes differ")
    lead: Dim = shape[0]
    if shape[0] == -1:
        lead = str(attrs["rows"]) if "rows" in attrs else x.shape[0]
        want("rows" not in attrs or x.shape[0] == 1, f"expand {x}: `rows` takes a value whose axis 0 is 1")
    out = (lead, *shape[1:])
    want(all(d in (1, e) for d, e in zip(x.shape, out, strict=True)), f"expand {x} to {out}: only axes of 1 repeat")
    return (TensorType(x.dtype, out),)


def cast(attrs: Attrs, types: Types) -> Out:
    """The first input in attribute `dtype`."""
    return (TensorType(str(attrs["dtype"]), types[0].shape),)


def reduce_last(attrs: Attrs, types: Types) -> Out:
    """The last axis becomes 1."""
    return (TensorType(types[0].dtype, (*types[0].shape[:-1], 1)),)


def reshape(attrs: Attrs, types: Types) -> Out:
    """`shape` with a leading -1 keeps the token axis; element counts of the rest must agree."""
    shape = as_ints(attrs["shape"])
    x = types[0]
    if shape and shape[0] == -1:
        want(prod(shape[1:]) == x.features, f"reshape {x} to {shape}: {x.features} elements a row do not fit")
        return (_view(x, (x.shape[0], *shape[1:]), x.strides()[0]),)
    want(all(isinstance(d, int) for d in x.shape), f"reshape {x} to {shape} would move the token axis")
    want(prod(shape) == prod(int(d) for d in x.shape), f"reshape {x} to {shape}: element counts differ")
    return (TensorType(x.dtype, shape),)


def _view(x: TensorType, shape: tuple[Dim, ...], row_stride: int) -> TensorType:
    """A reshaped view that keeps the distance between rows; the features of a row must lie densely."""
    dense = TensorType(x.dtype, x.shape).strides()
    want(x.strides()[1:] == dense[1:], f"reshape of {x}: its rows have gaps, copy it first")
    out = TensorType(x.dtype, shape)
    strides = (row_stride, *out.strides()[1:])
    if strides == out.strides():
        return out
    want(len(shape) > 1, f"reshape of {x} to {out}: the tokens lie apart, copy it first")
    return TensorType(x.dtype, shape, "strides:" + ",".join(str(s) for s in strides[:-1]))


def transpose(attrs: Attrs, types: Types) -> Out:
    """`perm` permutes the axes; a token axis must stay first."""
    perm, x = as_ints(attrs["perm"]), types[0]
    want(sorted(perm) == list(range(len(x.shape))), f"perm {perm} is no permutation of the axes of {x}")
    want(isinstance(x.shape[0], int) or perm[0] == 0, f"transpose {perm} of {x} would move the token axis")
    return (TensorType(x.dtype, tuple(x.shape[p] for p in perm)),)


def slice_(attrs: Attrs, types: Types) -> Out:
    """`start:stop` of `axis`: a view when the input has a token axis (its layout keeps the parent's strides)."""
    axis, start, stop, x = as_int(attrs["axis"]), as_int(attrs["start"]), as_int(attrs["stop"]), types[0]
    want(0 <= axis < len(x.shape) and isinstance(x.shape[axis], int), f"slice axis {axis} of {x}")
    want(0 <= start < stop <= int(x.shape[axis]), f"slice {start}:{stop} of axis {axis} of {x}")
    shape = (*x.shape[:axis], stop - start, *x.shape[axis + 1 :])
    if isinstance(x.shape[0], int) or shape == x.shape:
        return (TensorType(x.dtype, shape, x.layout if shape == x.shape else "row"),)
    view = TensorType(x.dtype, shape, "strides:" + ",".join(str(s) for s in x.strides()[:-1]))
    return (view if view.strides() != TensorType(x.dtype, shape).strides() else TensorType(x.dtype, shape),)


def concat(attrs: Attrs, types: Types) -> Out:
    """Inputs joined along `axis`; the others must agree."""
    axis = as_int(attrs["axis"])
    first = types[0]
    for t in types[1:]:
        same_rest = all(a == b for i, (a, b) in enumerate(zip(first.shape, t.shape, strict=True)) if i != axis)
        want(t.dtype == first.dtype and same_rest, f"concat along {axis}: {first} and {t} differ elsewhere")
    total = sum(int(t.shape[axis]) for t in types)
    return (TensorType(first.dtype, (*first.shape[:axis], total, *first.shape[axis + 1 :])),)


def take_rows(attrs: Attrs, types: Types) -> Out:
    """Rows of x[T, ...] by index i32[R]."""
    x, index = types
    want(index.dtype in ("i32", "i64") and len(index.shape) == 1, f"row index must be i32[R], got {index}")
    return (TensorType(x.dtype, (index.shape[0], *x.shape[1:])),)


def embedding(attrs: Attrs, types: Types) -> Out:
    """table[N, ...] and ids i32[T] give f32[T, ...]."""
    table, ids = types
    want(ids.dtype == "i32" and len(ids.shape) == 1, f"ids must be i32[T], got {ids}")
    return (TensorType("f32", (ids.shape[0], *table.shape[1:])),)


def qembedding(attrs: Attrs, types: Types) -> Out:
    """The parts of W[N, K] and ids i32[T] give f32[T, K]."""
    check_parts(attrs, types[:-1])
    return embedding(attrs, (types[0], types[-1]))


def linear(attrs: Attrs, types: Types) -> Out:
    """x[..., K] @ w[N, K].T (+ b[N]) = f32[..., N]."""
    x, w = types[0], types[1]
    want(len(w.shape) == 2 and x.shape[-1] == w.shape[1], f"linear: x {x} does not fit w {w}")
    _bias(attrs, types, 2, w.shape[0])
    return (TensorType("f32", (*x.shape[:-1], w.shape[0])),)


def _bias(attrs: Attrs, types: Types, at: int, n: Dim) -> None:
    has = bool(attrs.get("bias", False))
    want(len(types) == at + has, f"expected {at + has} inputs with bias={has}, got {len(types)}")
    want(not has or types[at].shape == (n,), f"bias must have shape ({n},), got {types[at:]}")


def qlinear(attrs: Attrs, types: Types) -> Out:
    """Like linear, with the parts of W[N, K] in place of w; codes and scales of the rows in place of x."""
    given = operands(attrs, types)
    check_rows(attrs, given)
    check_parts(attrs, given.parts)
    _bias(attrs, given.others, 0, given.parts[0].shape[0])
    return linear({}, (given.x, given.parts[0]))


def add_norm(attrs: Attrs, types: Types) -> Out:
    """x and y of one shape (then norm parameters) give (normed, sum)."""
    want(types[0].shape == types[1].shape, f"add_norm: {types[0]} and {types[1]} differ")
    out = TensorType(types[0].dtype, types[0].shape)
    return (out, out)


def act_mul(attrs: Attrs, types: Types) -> Out:
    """act(gate) * up, both of one shape."""
    want(types[0].shape == types[1].shape, f"act_mul: {types[0]} and {types[1]} differ")
    return same(attrs, types)


def rotary(attrs: Attrs, types: Types) -> Out:
    """x[T, heads, D], cos and sin f32[max_len, R/2] with R <= D, positions i32[T]; the result is dense."""
    x, cos, sin, positions = types
    want(len(x.shape) == 3, f"rotary: x must be [T, heads, D], got {x}")
    want(cos.shape == sin.shape and len(cos.shape) == 2, f"rotary: tables {cos} and {sin} differ")
    want(2 * int(cos.shape[1]) <= int(x.shape[2]), f"rotary: table {cos} is wider than half of {x}")
    want(positions.shape == x.shape[:1], f"rotary: positions {positions} do not match {x}")
    return same(attrs, types)


def attention(attrs: Attrs, types: Types) -> Out:
    """q[T, Hq, D], k[T, Hk, D], v[T, Hk, Dv] (, sinks[Hq]) give [T, Hq, Dv]; all tokens are one sequence."""
    q, k, v = types[:3]
    want(all(len(t.shape) == 3 for t in (q, k, v)), f"attention takes [T, heads, D], got {q}, {k}, {v}")
    want(k.shape[:2] == v.shape[:2] and q.shape[2] == k.shape[2], f"attention: {q}, {k}, {v} do not fit")
    want(int(q.shape[1]) % int(k.shape[1]) == 0, f"attention: {q.shape[1]} query heads over {k.shape[1]} KV heads")
    _mask(attrs)
    _per_head("attention", attrs, types[3:], q.shape[1])
    return (TensorType("f32", (*q.shape[:2], v.shape[2])),)


def _mask(attrs: Attrs) -> None:
    kind, window = attrs["kind"], as_int(attrs["window"])
    want(kind in ("causal", "sliding", "chunked"), f"unknown mask kind {kind!r}")
    want((kind == "causal") == (window == 0), f"mask {kind} with window {window}")


def _per_head(op: str, attrs: Attrs, rest: Types, heads: Dim) -> None:
    """Inputs after the others: sinks, then alibi slopes, each f32[Hq] and there when its attribute says so."""
    count = bool(attrs.get("sinks", False)) + bool(attrs.get("alibi", False))
    want(len(rest) == count, f"{op}: expected {count} inputs for sinks and slopes, got {len(rest)}")
    want(all(t.shape == (heads,) and t.dtype == "f32" for t in rest), f"{op}: sinks and slopes must be f32[{heads}]")


def kv_append(attrs: Attrs, types: Types) -> Out:
    """k[T, heads, k_dim], v[T, heads, v_dim], slots i32[T] and the cache: no output, the cache changes."""
    k, v, slots, kv = types
    for t, dim in ((k, attrs["k_dim"]), (v, attrs["v_dim"])):
        want(t.shape[1:] == (attrs["heads"], dim), f"kv_append: {t} is not [T, {attrs['heads']}, {dim}]")
    want(slots.shape == k.shape[:1] and kv.dtype == "u8", f"kv_append: slots {slots}, cache {kv}")
    _cache("kv_append", attrs)
    return ()


def rotary_append(attrs: Attrs, types: Types) -> Out:
    """q[T, Hq, k_dim], k, v, cos, sin, positions, slots and the cache: q turned; the cache changes."""
    q, k, v, cos, sin, positions, slots, kv = types
    want(q.shape[2] == k.shape[2], f"rotary_append: {q} and {k} differ in width")
    rotary(attrs, (k, cos, sin, positions))
    kv_append(attrs, (k, v, slots, kv))
    return rotary(attrs, (q, cos, sin, positions))


def _cache(op: str, attrs: Attrs) -> None:
    """Elements of 8 bits have scales in the page, others have none."""
    scaled = attrs["dtype"] in ("i8", "f8e3m4", "f8e4m3")
    want(scaled or attrs["dtype"] in ("f32", "bf16"), f"{op}: no cache of {attrs['dtype']}")
    for name in ("k_scale_offset", "v_scale_offset"):
        want((name in attrs) == scaled, f"{op}: a cache of {attrs['dtype']} {'needs' if scaled else 'has no'} {name}")


def paged(attrs: Attrs, types: Types) -> Out:
    """q[T, Hq, D], cache, page_table, query_start, positions (, sinks[Hq]) give [T, Hq, v_dim]."""
    q, kv, table, start, positions = types[:5]
    want(q.shape[2] == attrs["k_dim"], f"paged_attention: {q} does not fit k_dim {attrs['k_dim']}")
    want(int(q.shape[1]) % as_int(attrs["heads"]) == 0, f"paged_attention: {q} over {attrs['heads']} KV heads")
    want(table.shape[0] == "S" and start.shape == ("S1",), f"paged_attention: table {table}, query_start {start}")
    want(kv.dtype == "u8" and positions.shape == q.shape[:1], f"paged_attention: cache {kv}, positions {positions}")
    _cache("paged_attention", attrs)
    _mask(attrs)
    _per_head("paged_attention", attrs, types[5:], q.shape[1])
    return (TensorType("f32", (*q.shape[:2], as_int(attrs["v_dim"]))),)
