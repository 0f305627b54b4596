"""kv_layout: the cache takes keys and values, and what a head has of its own goes on to the paged attention."""

from dataclasses import replace

import pytest

from planc.codegen.target import parse as parse_target
from planc.compiler.ir.graph import Graph
from planc.compiler.ir.text import parse
from planc.compiler.ir.types import DTYPES
from planc.compiler.ir.verify import verify
from planc.passes.kv_layout import kv_layout
from planc.passes.options import Options

OPTIONS = Options(parse_target("cpu:portable"), "f32", "f32", 256, 4, 32, 16)
INPUTS = "%positions: i32[T], %slots: i32[T], %page_table: i32[S, M], %query_start: i32[S1], %kv: u8[P, 64]"
MASK = "kind='causal', layer=0, scale=0.5, softcap=0.0, window=0"


@pytest.mark.parametrize("own", [(), ("sinks",), ("slopes",), ("sinks", "slopes")])
def test_sinks_and_slopes_stay_in_order(own: tuple[str, ...]) -> None:
    heads = [f"%{name}" for name in own]
    flags = [f"{flag}=True" for flag, name in (("sinks", "sinks"), ("alibi", "slopes")) if name in own]
    graph = parse(
        f"graph g(%q: f32[T, 4, 8], %k: f32[T, 2, 8], %v: f32[T, 2, 8], {INPUTS}) {{\n"
        + "".join(f"  weight %{n}: f32[4] = load(dtype='f32', name='{n}', shape=(4,))\n" for n in own)
        + f"  %y: f32[T, 4, 8] = attention({', '.join(['%q', '%k', '%v', *heads, *flags, MASK])})\n"
        + "  return %y\n}\n"
    )
    verify(graph, "test")
    paged, count = kv_layout(graph, OPTIONS)
    verify(paged, "kv_layout")
    assert count == 1
    append, attention = paged.nodes
    assert append.inputs == ("k", "v", "slots", "kv")
    assert attention.inputs == ("q", "kv", "page_table", "query_start", "positions", *own)
    assert attention.attr("alibi", False) == ("slopes" in own)


def layers(*shapes: tuple[int, int, int]) -> Graph:
    """Attention layers one after the other; a shape is KV heads, k_dim, v_dim."""
    inputs, nodes = [], []
    for i, (heads, k_dim, v_dim) in enumerate(shapes):
        for name, count, dim in (("q", 2 * heads, k_dim), ("k", heads, k_dim), ("v", heads, v_dim)):
            inputs.append(f"%{name}{i}: f32[T, {count}, {dim}]")
        mask = MASK.replace("layer=0", f"layer={i}")
        nodes.append(f"  %y{i}: f32[T, {2 * heads}, {v_dim}] = attention(%q{i}, %k{i}, %v{i}, {mask})\n")
    outputs = ", ".join(f"%y{i}" for i in range(len(shapes)))
    return parse(f"graph g({', '.join(inputs)}, {INPUTS}) {{\n{''.join(nodes)}  return {outputs}\n}}\n")


def test_a_page_on_a_gpu_ends_with_the_ids_of_its_tokens() -> None:
    def page_bytes(target: str) -> int:
        paged, _ = kv_layout(layers((2, 8, 8)), replace(OPTIONS, target=parse_target(target), block_size=48))
        return next(int(v.type.shape[1]) for v in paged.inputs if v.name == "kv")

    keys_and_values = 2 * 2 * 8 * 48 * 4
    assert page_bytes("cpu:portable") == keys_and_values
    assert page_bytes("sm_90a") == keys_and_values + 256, "48 ids, and what device memory is given in"


@pytest.mark.parametrize("block", [16, 48])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i8", "f8e3m4", "f8e4m3"])
def test_parts_of_a_page_are_aligned_and_apart(dtype: str, block: int) -> None:
    shapes = [(2, 8, 8), (3, 5, 7), (1, 24, 16)]
    paged, _ = kv_layout(layers(*shapes), replace(OPTIONS, kv_dtype=dtype, block_size=block))
    verify(paged, "kv_layout")
    spans = []
    for node, (heads, k_dim, v_dim) in zip([n for n in paged.nodes if n.op == "kv_append"], shapes, strict=True):
        attrs = dict(node.attrs)
        size = heads * block * DTYPES[dtype].itemsize
        spans += [(attrs["k_offset"], k_dim * size), (attrs["v_offset"], v_dim * size)]
        if dtype in ("i8", "f8e3m4", "f8e4m3"):
            spans += [(attrs["k_scale_offset"], heads * block * 4), (attrs["v_scale_offset"], heads * block * 4)]
    spans.sort()
    (page,) = {n.attr("page_bytes") for n in paged.nodes}
    ends = [start + size for start, size in spans]
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(end <= start for end, (start, _) in zip(ends, spans[1:], strict=False))
    assert ends[-1] <= page == next(v.type.shape[1] for v in paged.inputs if v.name == "kv")
    assert page - sum(size for _, size in spans) < 64 * len(spans)


def test_layers_that_share_keys_share_their_scales() -> None:
    graph = layers((2, 8, 8))
    twice = [replace(graph.nodes[0], outputs=(replace(graph.nodes[0].out, name=name),)) for name in ("a", "b")]
    paged, count = kv_layout(replace(graph, nodes=tuple(twice), outputs=("a", "b")), replace(OPTIONS, kv_dtype="i8"))
    assert count == 2
    assert [n.op for n in paged.nodes] == ["kv_append", "paged_attention", "paged_attention"]
    assert len({n.attr("v_scale_offset") for n in paged.nodes}) == 1
