"""Plans of two ranks on two emulated GPUs: what collectives make of the ranks' parts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planc.emulator.run import emulated, run_emulated
from planc.errors import PlancError
from planc.plans import launches, schema, store
from planc.plans.launches import Arg, Launch, LaunchPlan
from planc.plans.tensors import Writer
from planc.runtime.cuda import CudaExecutor
from tests.emulator import counting
from tests.emulator.counting import SHIFT, VOCAB, batch

OTHER = SHIFT + 99  # where the second rank's hashes begin
A, B = [20, 21, 22], [50, 60]
STEP = batch([(A, 0, [3]), (B, 0, [1])])


def token(tokens: list[int], start: int) -> int:
    """What a rank says, from its own beginning of the hash."""
    for t in tokens:
        start = (start * 31 + t) % 2**32
    return 10 + start % (VOCAB - 10)


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> tuple[Path, schema.Plan]:
    root = tmp_path_factory.mktemp("ranks") / "plan"
    return root, counting.write_plan(root)


def of_two(root: Path, plan: schema.Plan, op: str | None, elements: int) -> tuple[Path, schema.Plan]:
    """Makes a plan one of two ranks: each spreads its logits over `part`, and a collective makes them the logits."""
    held = launches.load(root)
    part = replace(held.buffer["logits"], name="part", offset=held.arenas["act"])
    graphs = []
    for graph in held.graphs:
        key, logits = graph.launches[2].args
        spread = replace(graph.launches[2], args=(key, Arg("buffer", "part") if op else logits))
        args = (Arg("buffer", "part"), Arg("buffer", "logits"), Arg("i64", elements))
        last = (Launch(op, (1, 1, 1), args, (2,)),) if op else ()
        graphs.append(replace(graph, launches=(*graph.launches[:2], spread, *last)))
    arenas = held.arenas | {"act": part.offset + -(-part.nbytes // 256) * 256}
    launches.save(root, replace(held, buffers=(*held.buffers, part), arenas=arenas, graphs=tuple(graphs)))
    for rank, shift in enumerate((SHIFT, OTHER)):
        with Writer(root / schema.rank_file(rank), [("shift", "i32", (1,), 4)]) as file:
            file.write("shift", np.array([shift], np.int32))
    files = tuple(schema.rank_file(rank) for rank in range(2))
    return root, store.seal(root, replace(plan, limits=replace(plan.limits, ranks=2), weight_files=files))


@pytest.fixture
def copied(one, tmp_path) -> tuple[Path, schema.Plan]:
    shutil.copytree(one[0], tmp_path / "plan")
    return tmp_path / "plan", one[1]


def one_hot(*tokens: int) -> np.ndarray:
    return np.eye(VOCAB, dtype=np.float32)[list(tokens)]


def test_all_reduce_adds_the_parts(copied) -> None:
    plan = of_two(*copied, "all_reduce", 4 * VOCAB)
    (logits,) = run_emulated(*plan, [STEP], 8)
    expected = [one_hot(token(A, s), token(B, s)) for s in (SHIFT, OTHER)]
    np.testing.assert_array_equal(logits, expected[0] + expected[1])


def test_all_gather_puts_the_parts_behind_each_other(copied) -> None:
    plan = of_two(*copied, "all_gather", VOCAB)
    with emulated(*plan, 8) as gpus:
        logits = gpus.executor.step(STEP)
        np.testing.assert_array_equal(logits, one_hot(token(A, SHIFT), token(A, OTHER)))
        assert gpus.used > 0
        gpus.executor.close()
        assert gpus.used == 0


def test_ranks_that_disagree(copied) -> None:
    plan = of_two(*copied, None, 0)
    with pytest.raises(PlancError, match="the logits of rank 1 differ from those of rank 0"):
        run_emulated(*plan, [STEP], 8)


def test_a_collective_beyond_its_memory(copied) -> None:
    plan = of_two(*copied, "all_gather", 1 << 20)
    with pytest.raises(PlancError, match=r"all_gather of rank 0 touches \d+ bytes that are not within one allocation"):
        run_emulated(*plan, [STEP], 8)


def test_one_executor_alone_is_refused(copied) -> None:
    plan = of_two(*copied, "all_reduce", VOCAB)
    with pytest.raises(PlancError, match=r"the plan is for 2 ranks; .*--tp 1"):
        CudaExecutor(*plan, 8)


def test_a_collective_of_other_arguments_is_refused(copied) -> None:
    held: LaunchPlan = launches.load(copied[0])
    wrong = Launch("all_reduce", (1, 1, 1), (Arg("buffer", "key"), Arg("buffer", "logits"), Arg("i32", 4)), ())
    graphs = tuple(replace(g, launches=(*g.launches, wrong)) for g in held.graphs)
    with pytest.raises(ValueError, match="expected two buffers and a count"):
        launches.save(copied[0], replace(held, graphs=graphs))
