"""Numpy references of attention: plain over one sequence, and over the pages of a cache."""

from collections.abc import Sequence

import numpy as np

from planc.compiler.ir.quant import quantize_rows
from planc.compiler.ir.refs import Array, Attrs, Out, Types, as_float, as_int, rotary
from planc.compiler.ir.types import DTYPES

Heads = tuple[Array | None, Array | None]  # sinks[Hq] and alibi slopes[Hq]


def _visible(attrs: Attrs, q_pos: Array, k_pos: Array) -> Array:
    """[queries, keys]: which keys a query sees."""
    q, k, w = q_pos[:, None], k_pos[None], as_int(attrs, "window")
    seen = k <= q
    if attrs["kind"] == "sliding":
        seen &= k > q - w
    if attrs["kind"] == "chunked":
        seen &= k // w == q // w
    return np.asarray(seen)


def _attend(attrs: Attrs, q: Array, k: Array, v: Array, q_pos: Array, heads: Heads) -> Array:
    """q[T, Hq, D] over keys k[N, Hk, D] at positions 0..N-1, values v[N, Hk, Dv]."""
    sinks, slopes = heads
    group = q.shape[1] // k.shape[1]
    wide = np.einsum("thd,nhd->htn", q.astype(np.float64), np.repeat(k, group, axis=1).astype(np.float64))
    scores = wide * as_float(attrs, "scale")
    cap = as_float(attrs, "softcap")
    if cap:
        scores = cap * np.tanh(scores / cap)
    if slopes is not None:
        scores = scores + slopes[:, None, None].astype(np.float64) * (np.arange(len(k))[None] - q_pos[:, None])
    scores = np.where(_visible(attrs, q_pos, np.arange(len(k)))[None], scores, -np.inf)
    peak = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        peak = np.maximum(peak, sinks[:, None, None])
    p = np.exp(scores - peak)
    total = p.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - peak)
    out = np.einsum("htn,nhd->thd", p / total, np.repeat(v, group, axis=1).astype(np.float64))
    return out.astype(np.float32)


def _heads(attrs: Attrs, rest: Sequence[Array]) -> Heads:
    """The inputs after the others: sinks, then slopes, each when its attribute is set."""
    sinks, slopes = bool(attrs.get("sinks")), bool(attrs.get("alibi"))
    return rest[0] if sinks else None, rest[sinks] if slopes else None


def attention(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """All tokens are one sequence in order; the mask goes by index."""
    q, k, v = args[:3]
    return (_attend(attrs, q, k, v, np.arange(len(q)), _heads(attrs, args[3:])),)


def _pages(attrs: Attrs, kv: Array) -> tuple[Array, Array]:
    """Writable views of one layer: K [P, heads, k_dim, block], V [P, heads, block, v_dim]."""
    heads, block = as_int(attrs, "heads"), as_int(attrs, "block")
    dtype = DTYPES[str(attrs["dtype"])]
    out = []
    for name, shape in (("k", (heads, as_int(attrs, "k_dim"), block)), ("v", (heads, block, as_int(attrs, "v_dim")))):
        start = as_int(attrs, f"{name}_offset")
        size = int(np.prod(shape)) * dtype.itemsize
        out.append(kv[:, start : start + size].view(dtype).reshape(len(kv), *shape))
    return out[0], out[1]


def _scales(attrs: Attrs, kv: Array) -> tuple[Array, Array] | None:
    """Writable views of one layer's scales of K and of V, f32 [P, heads, block]; None where elements have none."""
    if "k_scale_offset" not in attrs:
        return None
    shape = (len(kv), as_int(attrs, "heads"), as_int(attrs, "block"))
    size = 4 * shape[1] * shape[2]
    starts = (as_int(attrs, f"{name}_scale_offset") for name in "kv")
    k, v = (kv[:, start : start + size].view(np.float32).reshape(shape) for start in starts)
    return k, v


def kv_append(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """Writes the step's keys and values into the cache at `slots`; the cache array itself changes."""
    k, v, slots, kv = args
    keys, values = _pages(attrs, kv)
    page, offset = np.divmod(slots, as_int(attrs, "block"))
    if scales := _scales(attrs, kv):
        dtype = str(attrs["dtype"])
        (k, scales[0][page, :, offset]), (v, scales[1][page, :, offset]) = _narrow(k, dtype), _narrow(v, dtype)
    keys[page, :, :, offset] = k
    values[page, :, offset] = v
    return ()


def rotary_append(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """rotary of queries and keys, and kv_append of the keys and their values."""
    q, k, v, *angles, slots, kv = args
    (turned,) = rotary(attrs, (k, *angles), types)
    kv_append(attrs, (turned, v, slots, kv), types)
    return rotary(attrs, (q, *angles), types)


def _narrow(x: Array, dtype: str) -> tuple[Array, Array]:
    """Codes [.., D] and scales [..]. A vector with a NaN or an infinity is a NaN: its scale is, its codes are 0."""
    broken = ~np.isfinite(x).all(axis=-1)
    codes, scale = quantize_rows(np.where(broken[..., None], np.float32(0), x), dtype)
    return codes, np.where(broken, np.float32(np.nan), scale)


def _cached(attrs: Attrs, kv: Array, pages: Array, n: int) -> tuple[Array, Array]:
    """K [n, heads, k_dim] and V [n, heads, v_dim] of the first n positions in `pages`, as float32, scales applied."""
    keys, values = _pages(attrs, kv)
    out = [_joined(keys[pages].transpose(0, 3, 1, 2), n), _joined(values[pages].transpose(0, 2, 1, 3), n)]
    for x, scales in zip(out, _scales(attrs, kv) or (), strict=False):
        x *= _joined(scales[pages].transpose(0, 2, 1), n)[..., None]
    return out[0], out[1]


def _joined(x: Array, n: int) -> Array:
    """[pages, block, ..] to the first n positions [n, ..], as float32."""
    return x.reshape(-1, *x.shape[2:])[:n].astype(np.float32)


def paged_attention(attrs: Attrs, args: Sequence[Array], types: Types) -> Out:
    """Each sequence's queries over its cached keys, found through its row of the page table."""
    q, kv, table, start, positions = args[:5]
    out = np.zeros((*q.shape[:2], as_int(attrs, "v_dim")), np.float32)
    for s in range(len(table)):
        rows = slice(int(start[s]), int(start[s + 1]))
        if rows.start == rows.stop:
            continue
        q_pos = positions[rows]
        n = int(q_pos.max()) + 1
        pages = table[s, : -(-n // as_int(attrs, "block"))]
        k, v = _cached(attrs, kv, pages, n)
        out[rows] = _attend(attrs, q[rows], k, v, q_pos, _heads(attrs, args[5:]))
    return (out,)
