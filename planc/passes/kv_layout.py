"""attention(q, k, v) -> kv_append(k, v, cache); paged_attention(q, cache): keys and values move to a paged cache.

A page holds `block_size` positions of every layer, K then V, at byte offsets that are constants of the plan. Layers
that attend to the same keys and values share one part of the page. Elements of 8 bits are followed by their scales, one
f32 a position and head for K and one for V, so that a page is whole by itself: it is kept, shared and dropped as one.
That scale covers the range, which leaves a bit of e4m3's exponent to the mantissa: e3m4 adds a quarter of its KL. GPUs
convert e4m3 alone.

On a GPU, a page ends with the ids of its tokens, i32 [block_size]: a sequence's history is then where its keys are,
whatever is shared, preempted or cut in chunks, and penalties look there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planc.compiler.ir.graph import Graph, Node, Value
from planc.compiler.ir.types import DTYPES, Attr, TensorType
from planc.passes.options import Options

SCALED = frozenset({"i8", "f8e3m4", "f8e4m3"})  # caches whose elements have scales
_ALIGN = 64  # bytes: a cache line, and the widest vector
_DEVICE_ALIGN = 256  # bytes that device memory is given in


@dataclass(frozen=True)
class _Part:
    """One layer's K and V in the page."""

    attrs: dict[str, Attr]
    owner: Node


def kv_layout(graph: Graph, options: Options) -> tuple[Graph, int]:
    """Pages every attention; counts them."""
    nodes = attentions(graph)
    parts, page_bytes = _layout(nodes, graph, options)
    replaced: dict[Node, list[Node]] = {}
    for n in nodes:
        part = parts[n.inputs[1:3]]
        attrs = part.attrs | {"page_bytes": page_bytes}
        append = [_append(n, attrs)] if part.owner is n else []
        replaced[n] = [*append, _paged(n, attrs)]
    kv = Value("kv", TensorType("u8", ("P", page_bytes)))
    inputs = tuple(kv if v.name == "kv" else v for v in graph.inputs)
    return replace(graph, inputs=inputs).rewrite(dict(replaced)), len(replaced)


def attentions(graph: Graph) -> list[Node]:
    """Attention nodes: none may be left."""
    return [n for n in graph.nodes if n.op == "attention"]


def _layout(nodes: list[Node], graph: Graph, options: Options) -> tuple[dict[tuple[str, ...], _Part], int]:
    parts: dict[tuple[str, ...], _Part] = {}
    at = 0
    for n in nodes:
        k, v = (graph.types[i] for i in n.inputs[1:3])
        if n.inputs[1:3] in parts:
            continue
        heads, k_dim, v_dim = int(k.shape[1]), int(k.shape[2]), int(v.shape[2])
        attrs: dict[str, Attr] = {"layer": len(parts), "heads": heads, "k_dim": k_dim, "v_dim": v_dim}
        attrs |= {"block": options.block_size, "dtype": options.kv_dtype}
        for name, size in _sizes(heads, k_dim, v_dim, options):
            attrs[name] = at
            at += _aligned(size)
        parts[n.inputs[1:3]] = _Part(attrs, n)
    if options.target.kind == "cuda":
        at = _aligned(at + options.block_size * DTYPES["i32"].itemsize, _DEVICE_ALIGN)
    return parts, at


def _sizes(heads: int, k_dim: int, v_dim: int, options: Options) -> Iterator[tuple[str, int]]:
    """The parts of a layer in the page, in order: the attribute that holds a part's offset, and its bytes."""
    vectors = heads * options.block_size
    for name, dim in (("k", k_dim), ("v", v_dim)):
        yield f"{name}_offset", vectors * dim * DTYPES[options.kv_dtype].itemsize
        if options.kv_dtype in SCALED:
            yield f"{name}_scale_offset", vectors * DTYPES["f32"].itemsize


def _aligned(n: int, to: int = _ALIGN) -> int:
    return -(-n // to) * to


def _append(n: Node, attrs: dict[str, Attr]) -> Node:
    return Node("kv_append", (*n.inputs[1:3], "slots", "kv"), (), tuple(attrs.items()), n.loc)


def _paged(n: Node, attrs: dict[str, Attr]) -> Node:
    inputs = (n.inputs[0], "kv", "page_table", "query_start", "positions", *n.inputs[3:])
    return Node("paged_attention", inputs, n.outputs, tuple((dict(n.attrs) | attrs).items()), n.loc)
