"""kv_layout: the cache takes keys and values, and what a head has of its own goes on to the paged attention."""

import pytest

from planc.codegen.target import parse as parse_target
from planc.compiler.ir.text import parse
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
