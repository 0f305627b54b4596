"""Lowering: buckets cover every step, launches name what exists, edges order what shares bytes, scratch is shared."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest

from planc.codegen.cuda.call import Bucket
from planc.codegen.cuda.lower import Limits, Lowered, buckets, lower
from planc.codegen.target import parse
from planc.compiler.ir.graph import Graph
from planc.passes.options import Options
from planc.passes.pipeline import run as run_passes
from planc.plans.launches import INPUTS, Binary, LaunchPlan, from_json, problems, to_json
from planc.plans.ranks import SHARED
from planc.plans.sampling import RECORD, RECORDS, SAMPLED
from tests.lifted import lifted
from tests.models import tiny
from tests.moe import MOE

LIMITS = Limits(128, 8, 16)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Graph]:
    """Graphs of tiny models after all passes for sm_90a."""

    @cache
    def of(name: str) -> Graph:
        return lifted(tiny(name, tmp_path_factory.mktemp(name), **MOE.get(name, {}))).graph

    def make(name: str, tp: int = 1) -> Graph:
        options = Options(parse("sm_90a"), "bf16", "bf16", 256, LIMITS.seqs, LIMITS.tokens, 16, tp=tp)
        return run_passes(of(name), options)[0]

    return make


def with_binaries(made: Lowered) -> LaunchPlan:
    """The launch plan as if each kernel had been compiled."""
    sizes = {"i32": 4, "fp32": 4, "i64": 8}
    binaries = []
    for k in made.kernels:
        params, at = [], 0
        for kind in k.signature.values():
            size = sizes.get(kind, 8)
            at = -(-at // size) * size
            params.append((at, size))
            at += size
        binaries.append(Binary(k.name, k.function, 128, 0, tuple(params), 0))
    return made.with_binaries(binaries)


@pytest.mark.parametrize("limits", [Limits(2048, 64, 8), Limits(1, 1, 1), Limits(100, 100, 1), Limits(48, 3, 2)])
def test_buckets_hold_every_step(limits: Limits) -> None:
    made = buckets(limits)
    assert len(set(made)) == len(made)
    for seqs in range(1, min(limits.seqs, limits.tokens) + 1):
        for tokens in {seqs, (seqs + limits.tokens) // 2, limits.tokens}:
            assert any(b.tokens >= tokens and b.seqs >= seqs and b.rows >= seqs for b in made)
    assert max(b.tokens for b in made) == limits.tokens


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mixtral"])
def test_a_launch_plan_has_no_problems_and_reads_back(name: str, planned: Callable[..., Graph]) -> None:
    made = lower(planned(name), 90, LIMITS, buckets(LIMITS))
    plan = with_binaries(made)
    assert list(problems(plan)) == []
    assert from_json(to_json(plan)) == plan
    assert sum(made.counts.values()) == sum(len(g.launches) for g in plan.graphs)


def test_a_bucket_brings_no_more_inputs_than_it_holds_and_all_begin_where_one_does(
    planned: Callable[..., Graph],
) -> None:
    plan = with_binaries(lower(planned("llama"), 90, LIMITS, buckets(LIMITS)))
    spans = [g.input_span for g in plan.graphs]
    assert {start for start, _ in spans} == {plan.buffer[SAMPLED].nbytes + 192} == {256}
    one = 3 * 16 + 4 * LIMITS.pages + 2 * 16 + 4 * RECORD
    largest = 3 * 4 * 128 + 8 * 4 * LIMITS.pages + 48 + 32 + 8 * 4 * RECORD
    assert [stop - start for start, stop in (spans[0], spans[-1])] == [one, largest]
    assert plan.arenas["io"] == -(-(256 + largest) // 256) * 256
    named = {str(a.value) for g in plan.graphs for x in g.launches for a in x.args}
    assert named >= {*INPUTS, RECORDS}


def test_launches_of_a_chain_wait_for_one_another_and_layers_of_the_cache_do_not(planned: Callable[..., Graph]) -> None:
    graph = planned("llama")
    (step,) = lower(graph, 90, LIMITS, [Bucket(4, 4, 4)]).plan.graphs
    kernels = [launch.kernel for launch in step.launches]
    append = [i for i, name in enumerate(kernels) if name.startswith("rotary_append")]
    attend = [i for i, name in enumerate(kernels) if name.startswith("attend")]
    assert len(append) == len(attend) == 2
    for a, b in zip(append, attend, strict=True):
        assert a in step.launches[b].deps
    assert append[0] not in step.launches[append[1]].deps
    remember = [i for i, name in enumerate(kernels) if name.startswith("remember")]
    assert remember == [len(kernels) - 4], "the ids of tokens, and then three launches that choose tokens"
    assert all(launch.deps for i, launch in enumerate(step.launches[1:], 1) if i not in remember)
    assert remember[0] in step.launches[-3].deps


def test_collectives_are_ordered(planned: Callable[..., Graph]) -> None:
    graph = planned("llama", tp=2)
    made = lower(graph, 90, LIMITS, [Bucket(4, 4, 4)])
    assert list(problems(with_binaries(made))) == []
    launches = made.plan.graphs[0].launches
    assert made.plan.arenas[SHARED] == made.plan.buffer[SHARED].nbytes > 2 << 20
    order = [i for i, launch in enumerate(launches) if any(a.value == SHARED for a in launch.args)]
    assert len(order) >= 5, "two a layer and one for the logits"
    before: list[set[int]] = []
    for launch in launches:
        before.append(set().union(*({d} | before[d] for d in launch.deps)))
    assert all(a in before[b] for a, b in pairwise(order))
