"""Plans of two ranks on two emulated GPUs: what collectives make of the ranks' parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planc.emulator.run import emulated, run_emulated
from planc.errors import PlancError
from planc.plans import launches, store
from tests.emulator.counting import VOCAB
from tests.emulator.ranked import STEP, A, B, one_hot, token, write_plan


def test_all_reduce_adds_the_parts(tmp_path) -> None:
    plan = write_plan(tmp_path / "plan", "all_reduce", 4 * VOCAB)
    for seed in range(4):
        (logits,) = run_emulated(*plan, [STEP], 8, seed=seed)
        expected = [one_hot(token(A, rank), token(B, rank)) for rank in range(2)]
        np.testing.assert_array_equal(logits, expected[0] + expected[1])


def test_all_gather_puts_the_parts_behind_each_other(tmp_path) -> None:
    with emulated(*write_plan(tmp_path / "plan", "all_gather", VOCAB), 8) as gpus:
        for _ in range(3):
            logits = gpus.executor.step(STEP)
            np.testing.assert_array_equal(logits, one_hot(token(A, 0), token(A, 1)))


def test_ranks_that_disagree(tmp_path) -> None:
    plan = write_plan(tmp_path / "plan", None)
    with pytest.raises(PlancError, match="the logits of rank 1 differ from those of rank 0"):
        run_emulated(*plan, [STEP], 8)


def test_a_collective_beyond_its_memory(tmp_path) -> None:
    plan = write_plan(tmp_path / "plan", "all_gather", 1 << 20)
    with pytest.raises(PlancError, match=r"kernel all_gather: a load of 16 bytes .* lies outside of .* buffer part"):
        run_emulated(*plan, [STEP], 8)


def test_a_result_beyond_a_peers_memory(tmp_path) -> None:
    """Rank 1 sends behind rank 0's part, which lies behind the logits."""
    plan = write_plan(tmp_path / "plan", "all_gather", 3 * VOCAB)
    with pytest.raises(PlancError, match=r"rank 1: .*a store of .* lies outside of .*buffer logits"):
        run_emulated(*plan, [STEP], 8)


def test_a_collective_that_does_not_wait_for_its_part(tmp_path) -> None:
    root, plan = write_plan(tmp_path / "plan", "all_reduce", 4 * VOCAB)
    held = launches.load(root)
    graphs = [replace(g, launches=(*g.launches[:3], replace(g.launches[3], deps=(1,)))) for g in held.graphs]
    launches.save(root, replace(held, graphs=tuple(graphs)))
    with pytest.raises(PlancError, match=r"\(spread\) and launch 3 \(all_reduce_one_shot\) of a graph touch"):
        for seed in range(4):
            run_emulated(root, store.seal(root, plan), [STEP], 8, seed=seed)
