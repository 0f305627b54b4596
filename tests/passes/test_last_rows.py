"""last_rows: only what the wanted logits need runs on their rows, and the graph computes what it did."""

import numpy as np
import pytest

from planc.codegen.target import parse as parse_target
from planc.compiler.coverage.small import small
from planc.compiler.ir.graph import Graph
from planc.compiler.ir.interp import run
from planc.compiler.ir.text import parse
from planc.compiler.ir.verify import verify
from planc.compiler.lift import lift
from planc.compiler.trace import trace
from planc.passes import pipeline
from planc.passes.last_rows import last_rows
from planc.passes.options import Options
from tests.compiler.lift.capture import recipes

OPTIONS = Options(parse_target("cpu:portable"), "f32", "f32", 256, 4, 32, 16)
HEAD = "graph g(%x: f32[T, 8], %y: f32[T, 8], %i: i32[T], %logit_rows: i32[R]) {\n"
ATTENTION = "attention(%q, %q, %q, scale=0.5, kind='causal', window=0, softcap=0.0, layer=0)"


def graph(*lines: str, outputs: str = "%logits") -> Graph:
    made = parse(HEAD + "".join(f"  {line}\n" for line in lines) + f"  return {outputs}\n}}\n")
    verify(made, "test")
    return made


def moved(*lines: str, outputs: str = "%logits") -> tuple[Graph, int]:
    """The graph after the pass, which gives the same under the same names."""
    before = graph(*lines, outputs=outputs)
    after, count = last_rows(before, OPTIONS)
    verify(after, "last_rows")
    assert after.outputs == before.outputs
    rng = np.random.default_rng(0)
    given = {name: rng.standard_normal((5, 8)).astype(np.float32) for name in "xy"}
    given |= {"i": rng.integers(0, 5, 5).astype(np.int32), "logit_rows": np.array([4, 0, 4], np.int32)}
    results = run(after, given, {})
    for name, want in run(before, given, {}).items():
        np.testing.assert_array_equal(results[name], want)
    return after, count


def rows(made: Graph) -> dict[str, str]:
    """The symbol of each node's first axis, by the value that it makes."""
    return {n.out.name: str(n.out.type.shape[0]) for n in made.nodes}


def test_a_chain_runs_on_the_wanted_rows() -> None:
    take = "%logits: f32[R, 8] = take_rows(%b, %logit_rows)"
    after, count = moved("%a: f32[T, 8] = exp(%x)", "%b: f32[T, 8] = neg(%a)", take)
    assert count == 2
    assert [n.op for n in after.nodes] == ["take_rows", "exp", "neg"]
    assert rows(after) == {"x.taken": "R", "a": "R", "logits": "R"}


def test_each_value_that_meets_the_rows_is_taken_from_once() -> None:
    after, count = moved(
        "%a: f32[T, 8] = mul(%x, %y)",
        "%b: f32[T, 8] = add(%a, %x)",
        "%r: f32[R, 8] = take_rows(%b, %logit_rows)",
        "%logits: f32[R, 8] = exp(%r)",
    )
    assert count == 2
    assert [n.op for n in after.nodes] == ["take_rows", "take_rows", "mul", "add", "exp"]


def test_attention_and_what_it_reads_keep_all_tokens() -> None:
    after, count = moved(
        "%a: f32[T, 8] = exp(%x)",
        "%q: f32[T, 2, 4] = reshape(%a, shape=(-1, 2, 4))",
        f"%o: f32[T, 2, 4] = {ATTENTION}",
        "%f: f32[T, 8] = reshape(%o, shape=(-1, 8))",
        "%s: f32[T, 8] = add(%f, %a)",
        "%logits: f32[R, 8] = take_rows(%s, %logit_rows)",
    )
    assert count == 2
    assert rows(after) == {"a": "T", "q": "T", "o": "T", "o.taken": "R", "f": "R", "a.taken": "R", "logits": "R"}


def test_what_others_read_too_keeps_all_tokens() -> None:
    after, count = moved(
        "%a: f32[T, 8] = exp(%x)",
        "%b: f32[T, 8] = neg(%a)",
        "%logits: f32[R, 8] = take_rows(%b, %logit_rows)",
        outputs="%logits, %a",
    )
    assert count == 1
    assert rows(after) == {"a": "T", "a.taken": "R", "logits": "R"}


def test_both_outputs_of_a_node_move_or_neither() -> None:
    top = "%v: f32[T, 3], %p: i32[T, 3] = topk(%x, k=3, largest=True)"
    gathered = "%g: f32[T, 3] = gather(%y, %p)"
    total = "%t: f32[T, 3] = mul(%v, %g)"
    take = "%logits: f32[R, 3] = take_rows(%t, %logit_rows)"
    after, count = moved(top, gathered, total, take)
    assert count == 4
    assert set(rows(after).values()) == {"R"}
    after, count = moved(top, gathered, total, take, outputs="%logits, %p")
    assert count == 2
    assert rows(after)["v"] == "T"


def test_integers_are_taken_too() -> None:
    after, count = moved(
        "%h: i32[T] = add(%i, scalar=1)",
        "%f: f32[T] = cast(%h, dtype='f32')",
        "%w: f32[T, 1] = reshape(%f, shape=(-1, 1))",
        "%m: f32[T, 8] = mul(%x, %w)",
        "%logits: f32[R, 8] = take_rows(%m, %logit_rows)",
    )
    assert count == 4
    assert set(rows(after).values()) == {"R"}


def test_nothing_moves_where_no_rows_are_taken() -> None:
    before = graph("%logits: f32[T, 8] = exp(%x)")
    assert last_rows(before, OPTIONS) == (before, 0)


def test_rows_by_another_index_stay() -> None:
    after, count = moved("%a: f32[T, 8] = exp(%x)", "%logits: f32[T, 8] = take_rows(%a, %i)")
    assert count == 0
    assert [n.op for n in after.nodes] == ["exp", "take_rows"]


@pytest.mark.parametrize("arch", ["llama", "bloom", "deepseek_v3"])
def test_nothing_after_the_last_attention_runs_on_all_tokens(arch: str) -> None:
    """Of a layer of experts too, which is deepseek's last."""
    traced = trace(small(arch))
    names = [p.name for p in pipeline.PIPELINE]
    graph = lift(traced, recipes(traced.module))
    graph, _ = pipeline.run(graph, OPTIONS, pipeline=pipeline.PIPELINE[: names.index("last_rows") + 1])
    assert graph.outputs == ("logits",)
    last = max(i for i, n in enumerate(graph.nodes) if n.op == "attention")
    wide = [n for n in graph.nodes[last + 1 :] if n.out.type.shape[0] == "T"]
    assert not wide
    taken = [graph.producers[n.inputs[0]].op for n in graph.nodes if n.op == "take_rows"]
    assert taken[:2] == ["attention", "add"], "what attention gives, and the residual stream"
    assert set(taken[2:]) <= {"expand"}, "a constant repeated for each token"
