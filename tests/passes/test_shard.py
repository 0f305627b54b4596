"""Tensor parallelism: all ranks together compute what one computed, each from its part of the weights."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from planc.codegen.target import parse
from planc.compiler.ir.graph import Graph
from planc.compiler.ir.interp import execute, run, run_ranks, weights_of
from planc.compiler.ir.ops import APPENDS
from planc.compiler.ir.shards import graph_of_rank, ranks_of
from planc.compiler.ir.text import parse as parse_graph
from planc.compiler.ir.verify import verify
from planc.errors import PlancError, UsageError
from planc.passes import pipeline
from planc.passes.options import Options
from planc.passes.shard import replicated, shard
from tests.lifted import Lifted, inputs, lifted, logits, relative_error
from tests.models import tiny
from tests.moe import MOE

ROWS = [40, 3, 7]
IDS = np.random.default_rng(0).integers(3, 300, 41)


def options(tp: int, dtype: str = "f32") -> Options:
    fields = {"target": parse("cpu:portable"), "dtype": dtype, "kv_dtype": "f32", "max_model_len": 256}
    return Options(**fields, max_num_seqs=8, max_num_batched_tokens=64, block_size=16, tp=tp)


def of_ranks(model: Lifted, graph: Graph, tp: int) -> list[np.ndarray]:
    """The logits of each rank, all run together by the references."""
    own = [weights_of(graph_of_rank(graph, r), model.source.read, graph.constants) for r in range(tp)]
    made = run_ranks(graph, [inputs(graph, IDS, ROWS) for _ in range(tp)], own)
    return [out[graph.outputs[0]] for out in made]


def loaded_bytes(graph: Graph) -> int:
    return sum(w.value.type.nbytes() for w in graph.weights if w.recipe.loads)


# What stands out, the ranks, what every rank holds whole, and how many collectives there are.
CASES = {
    "llama": (2, (), 5),
    "llama-4": (4, (), 5),  # fewer KV heads than ranks
    "gpt2": (2, ("wpe",), 5),  # fused q, k, v; biases; a tied head
    "mixtral": (2, ("gate", "gate"), 5),  # experts
    "falcon": (2, (), 3),  # one KV head in a fused projection; attention and MLP are summed together
    "gemma2": (2, (), 5),  # scaled embedding, a cap behind the head
    "phi3": (2, (), 5),  # fused gate and up
    "gpt_neox": (4, (), 3),  # q, k and v of each head side by side
    "gpt_oss": (2, ("router", "router"), 5),  # sinks, biases of experts, gate and up in turns
    "deepseek_v3": (2, ("q_a_proj",) * 3, 7),  # latents stay whole
    "olmo2": (2, ("q_proj", "o_proj") * 2, 3),  # a norm over all heads
    "bloom": (2, (), 5),  # alibi slopes, a part of them each
}
_NIGHTLY = ("llama", "gemma2", "phi3", "gpt_neox", "gpt_oss", "deepseek_v3", "olmo2", "bloom")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in _NIGHTLY else []) for n in CASES])
def test_all_ranks_compute_what_one_did(name: str, tmp_path: Path) -> None:
    tp, whole, collectives = CASES[name]
    arch = name.partition("-")[0]
    model = lifted(tiny(arch, tmp_path, **MOE.get(arch, {})))
    one, _ = pipeline.run(model.graph, options(1))
    graph, _ = pipeline.run(model.graph, options(tp))
    first, *others = of_ranks(model, graph, tp)
    assert relative_error(first, logits(model, one, IDS, ROWS)) < 2e-6
    for other in others:
        np.testing.assert_array_equal(other, first)
    assert [name.rpartition(".")[2] for name in replicated(graph)] == list(whole)
    count = Counter(n.op for n in graph.nodes)
    assert (count["all_reduce"], count["all_gather"]) == (collectives, 1)
    assert loaded_bytes(graph) < loaded_bytes(one) * (1 / tp + (0.3 if whole else 0.15))


COVERED = re.findall(r"^\| (\w+) \| .*\| equal \|$", (Path(__file__).parents[2] / "docs/coverage.md").read_text(), re.M)


@pytest.mark.slow
@pytest.mark.parametrize("arch", COVERED)
def test_every_type_that_compiles_can_be_split(arch: str, tmp_path: Path) -> None:
    """Two ranks compute what the unsplit graph does, right behind the pass; a part of the model at least is split."""
    model = lifted(tiny(arch, tmp_path, tokenizer=False, **MOE.get(arch, {})))
    first = [p.name for p in pipeline.PIPELINE].index("shard")
    whole, _ = pipeline.run(model.graph, options(2), pipeline=pipeline.PIPELINE[:first])
    graph, _ = pipeline.run(whole, options(2), pipeline=pipeline.PIPELINE[first : first + 1])
    assert relative_error(of_ranks(model, graph, 2)[0], logits(model, whole, IDS, ROWS)) < 5e-6
    assert loaded_bytes(graph) < 0.95 * loaded_bytes(whole)
    pipeline.run(graph, options(2), pipeline=pipeline.PIPELINE[first + 1 :])


def test_ranks_that_do_not_divide_the_heads_are_told_which_do(tmp_path: Path) -> None:
    model = lifted(tiny("llama", tmp_path, num_attention_heads=12, num_key_value_heads=3, hidden_size=96))
    with pytest.raises(
        UsageError, match=r"--tp 5 does not divide the 12 query heads of model\.layers\.0\.self_attn; 1, 2, 3, 4, 6 and"
    ):
        pipeline.run(model.graph, options(5))
    graph, _ = pipeline.run(model.graph, options(2))  # three KV heads for two ranks: the second is on both
    assert next(n for n in graph.nodes if n.op in APPENDS).attr("heads") == 3
    one, _ = pipeline.run(model.graph, options(1))
    assert relative_error(of_ranks(model, graph, 2)[0], logits(model, one, IDS, ROWS)) < 2e-6


def test_one_rank_is_the_identity(tmp_path: Path) -> None:
    graph = parse_graph(_mlp())
    assert shard(graph, options(1)) == (graph, 0)


def _mlp(between: str = "%a: f32[T, 6] = silu(%up)", last: str = "a", width: int = 6) -> str:
    """x -> up -> .. -> down -> out, behind an embedding and before a head."""
    return f"""
graph g(%ids: i32[T]) {{
  weight %e: f32[10, 4] = load(dtype='f32', name='e', shape=(10, 4))
  weight %u: f32[6, 4] = load(dtype='f32', name='u', shape=(6, 4))
  weight %ub: f32[6] = load(dtype='f32', name='ub', shape=(6,))
  weight %d: f32[4, {width}] = load(dtype='f32', name='d', shape=(4, {width}))
  weight %db: f32[4] = load(dtype='f32', name='db', shape=(4,))
  weight %g: f32[6] = load(dtype='f32', name='g', shape=(6,))
  weight %h: f32[9, 4] = load(dtype='f32', name='h', shape=(9, 4))
  %x: f32[T, 4] = embedding(%e, %ids)
  %up: f32[T, 6] = linear(%x, %u, %ub, bias=True)  # up
  {between}
  %down: f32[T, 4] = linear(%{last}, %d, %db, bias=True)  # down
  %y: f32[T, 4] = add(%x, %down)
  %logits: f32[T, 9] = linear(%y, %h)
  return %logits
}}
"""


def both_ways(text: str, tp: int) -> tuple[Graph, float]:
    """The sharded graph, and its largest error."""
    graph = parse_graph(text)
    verify(graph, "test")
    made, _ = shard(graph, options(tp))
    verify(made, "shard")
    rng = np.random.default_rng(1)
    tensors = {
        str(leaf.get("name")): rng.standard_normal(leaf.get("shape")).astype(np.float32)
        for w in graph.weights
        for leaf in w.recipe.leaves()
        if leaf.op == "load"
    }
    feed = {"ids": np.array([0, 9, 4, 3, 7], np.int32)}
    want = run(graph, feed, weights_of(graph, tensors.__getitem__, {}))["logits"]
    own = [weights_of(graph_of_rank(made, r), tensors.__getitem__, made.constants) for r in range(tp)]
    got = run_ranks(made, [feed] * tp, own)
    assert all((o["logits"] == got[0]["logits"]).all() for o in got)
    return made, relative_error(got[0]["logits"], want)


BETWEEN = {
    "elementwise, with a weight": ("%b: f32[T, 6] = silu(%up)\n  %a: f32[T, 6] = mul(%b, %g)", "a", 6, True),
    "halves, gated": (
        "%p: f32[T, 3]@strides:6 = slice(%up, axis=1, start=0, stop=3)\n"
        "  %q: f32[T, 3]@strides:6 = slice(%up, axis=1, start=3, stop=6)\n"
        "  %a: f32[T, 3] = mul(%p, %q)", "a", 3, False,
    ),
    "in groups, normalized in each": (
        "%p: f32[T, 3, 2] = reshape(%up, shape=(-1, 3, 2))\n  %n: f32[T, 3, 2] = rms_norm(%p, eps=1e-05)\n"
        "  %a: f32[T, 6] = reshape(%n, shape=(-1, 6))", "a", 6, True,
    ),
    "turned and back": (
        "%p: f32[T, 3, 2] = reshape(%up, shape=(-1, 3, 2))\n  %t: f32[T, 2, 3] = transpose(%p, perm=(0, 2, 1))\n"
        "  %s: f32[T, 2, 3] = silu(%t)\n  %v: f32[T, 3, 2] = transpose(%s, perm=(0, 2, 1))\n"
        "  %a: f32[T, 6] = reshape(%v, shape=(-1, 6))", "a", 6, True,
    ),
    "normalized over all": ("%a: f32[T, 6] = rms_norm(%up, eps=1e-05)", "a", 6, False),
    "joined along the axis": (
        "%s: f32[T, 6] = silu(%up)\n  %a: f32[T, 12] = concat(%s, %up, axis=1)", "a", 12, False,
    ),
    "one half whole beside the other": (
        "%p: f32[T, 3]@strides:6 = slice(%up, axis=1, start=0, stop=3)\n"
        "  %q: f32[T, 3]@strides:6 = slice(%up, axis=1, start=3, stop=6)\n"
        "  %m: f32[T, 1] = sum(%q)\n  %a: f32[T, 3] = mul(%p, %m)", "a", 3, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BETWEEN)
def test_what_lies_between_two_products(what: str) -> None:
    """It runs on parts where it can: the second product then sums over ranks. Where it cannot, all stays whole."""
    between, last, width, splits = BETWEEN[what]
    made, error = both_ways(_mlp(between, last, width), 3)
    assert error < 2e-6
    up, down = (next(n for n in made.nodes if n.loc == loc and n.op == "linear") for loc in ("up", "down"))
    split = what == "halves, gated" or splits
    assert [ranks_of(made.weight_by_name[n.inputs[1]].recipe) for n in (up, down)] == [3 if split else 1] * 2
    assert ("all_reduce" in {n.op for n in made.nodes if n.loc == "down"}) == split


def test_a_vocabulary_that_does_not_divide_has_rows_on_two_ranks() -> None:
    made, error = both_ways(_mlp(), 2)  # 10 rows of the table, 9 of the head
    assert error < 2e-6
    gather = next(n for n in made.nodes if n.op == "all_gather")
    assert (gather.attr("starts"), gather.attr("size")) == ((0, 4), 9)
    _, error = both_ways(_mlp(), 3)  # the table's ranks share rows too: each counts once
    assert error < 2e-6


def test_sums_are_joined_as_late_as_one_reader_allows() -> None:
    """embed * 2 is one sum over ranks, reduced behind the product with the number."""
    text = _mlp().replace("embedding(%e, %ids)", "mul(%rows, scalar=2.0)")
    text = text.replace("  %x: ", "  %rows: f32[T, 4] = embedding(%e, %ids)\n  %x: ")
    made, error = both_ways(text, 2)
    assert error < 2e-6
    assert [n.out.name for n in made.nodes if n.op == "all_reduce"] == ["x", "down"]


def test_ranks_have_equal_parts_of_the_inner_axis_or_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"--tp 4 does not divide the 6 inputs of down; 1, 2, 3 and 6 divide all"):
        both_ways(_mlp(), 4)


def test_what_no_number_of_ranks_could_split_refuses_none() -> None:
    """Groups of 3 and then of 2 of the same six: no part keeps both together."""
    groups = """%p: f32[T, 2, 3] = reshape(%up, shape=(-1, 2, 3))
  %n: f32[T, 2, 3] = rms_norm(%p, eps=1e-05)
  %q: f32[T, 3, 2] = reshape(%n, shape=(-1, 3, 2))
  %m: f32[T, 3, 2] = rms_norm(%q, eps=1e-05)
  %a: f32[T, 6] = reshape(%m, shape=(-1, 6))"""
    made, error = both_ways(_mlp(groups), 4)
    assert error < 2e-6
    assert replicated(made) == ("up", "down")


def test_nothing_to_split_is_said() -> None:
    text = """
graph g(%x: f32[T, 4]) {
  weight %n: f32[4] = load(dtype='f32', name='n', shape=(4,))
  %y: f32[T, 4] = rms_norm(%x, %n, eps=1e-05)
  return %y
}
"""
    with pytest.raises(PlancError, match="nothing of this model can be split over 2 ranks"):
        shard(parse_graph(text), options(2))


def test_one_rank_alone_cannot_be_interpreted() -> None:
    made, _ = both_ways(_mlp(), 2)
    node = next(n for n in made.nodes if n.op == "all_reduce")
    with pytest.raises(ValueError, match="all_reduce at top level joins all ranks"):
        execute(node, {}, made)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Lifted:
    """A model whose parts of two ranks still have groups."""
    return lifted(tiny("llama", tmp_path_factory.mktemp("wide"), hidden_size=128, intermediate_size=256))


@pytest.mark.parametrize(
    ("dtype", "most"), [("int8-wo", 0.02), ("awq-g32", 1e-5), pytest.param("fp8-block", 0.2, marks=pytest.mark.slow)]
)
def test_parts_are_quantized_by_themselves(wide: Lifted, dtype: str, most: float) -> None:
    """A part has scales of its own; groups of 32 are the very ones of the whole."""
    graph, _ = pipeline.run(wide.graph, options(2, dtype))
    one, _ = pipeline.run(wide.graph, options(1, dtype))
    assert {n.op for n in graph.nodes} >= {"qlinear", "all_reduce"}
    assert relative_error(of_ranks(wide, graph, 2)[0], logits(wide, one, IDS, ROWS)) < most
    q = next(w for w in graph.weights if re.fullmatch(r".*down_proj.*\.q", w.name))
    assert q.value.type.shape == (128, 128)
