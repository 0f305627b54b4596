"""select: packed experts, copies before what cannot read a view, and parts of values without tokens."""

import pytest

from planc.codegen.target import parse as parse_target
from planc.compiler.ir.graph import Graph
from planc.compiler.ir.text import parse
from planc.compiler.ir.verify import verify
from planc.errors import PlancError
from planc.passes.options import Options
from planc.passes.select import select

OPTIONS = Options(parse_target("cpu:portable"), "f32", "f32", 256, 4, 32, 16)


def selected(*lines: str, output: str = "%z") -> Graph:
    text = "graph g(%x: f32[T, 16], %which: i32[T, 2]) {\n" + "".join(f"  {line}\n" for line in lines)
    graph = parse(f"{text}  return {output}\n}}\n")
    verify(graph, "test")
    graph, _ = select(graph, OPTIONS)
    verify(graph, "select")
    return graph


def test_experts_are_packed_one_by_one() -> None:
    graph = selected(
        "weight %w: bf16[4, 70, 16] = load(dtype='bf16', name='w', shape=(4, 70, 16))",
        "%z: f32[T, 2, 70] = expert_linear(%x, %which, %w)",
    )
    assert str(graph.types["w"]) == "bf16[4, 70, 16]@n64k2"
    assert graph.types["w"].nbytes() == 4 * 128 * 16 * 2


def test_rows_are_taken_from_a_copy_when_they_have_gaps() -> None:
    graph = selected(
        "%a: f32[T, 16] = neg(%x)",
        "%h: f32[T, 4, 4] = reshape(%a, shape=(-1, 4, 4))",
        "%s: f32[T, 4, 2]@strides:16,4 = slice(%h, axis=2, start=0, stop=2)",
        "%i: i32[T, 1] = argmax(%a)",
        "%v: i32[T] = reshape(%i, shape=(-1,))",
        "%z: f32[T, 4, 2] = take_rows(%s, %v)",
    )
    assert [n.op for n in graph.nodes].count("copy") == 1


def test_a_part_of_rows_without_tokens_is_named() -> None:
    weight = "weight %w: f32[2, 9] = load(dtype='f32', name='w', shape=(2, 9))"
    top = "%v: f32[2, 4], %i: i32[2, 4] = topk(%w, k=4, largest=True)"
    with pytest.raises(PlancError, match=r"slice at top level: %v f32\[2, 4\] has no tokens"):
        selected(weight, top, "%z: f32[2, 2] = slice(%v, axis=1, start=1, stop=3)")
    graph = selected(weight, top, "%z: f32[1, 4] = slice(%v, axis=0, start=1, stop=2)")
    assert graph.nodes[-1].op == "slice"
