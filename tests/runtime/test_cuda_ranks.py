"""The executor of several GPUs on emulated ones: its memory, what it refuses, and what it says when a rank fails."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from planc.emulator import driver
from planc.emulator.device import Device, Graph, Reach, State
from planc.emulator.ranks import EmulatedRanks
from planc.emulator.run import allocated, device_of, emulated, texts_of
from planc.errors import PlancError
from planc.plans import launches, ranks, schema
from planc.plans.ranks import SHARED
from planc.runtime.batch import Batch
from planc.runtime.cuda import arena_bytes
from planc.runtime.cuda_ranks import CudaRanks
from planc.runtime.executors import kv_memory, open_executor
from tests.emulator.counting import VOCAB, batch
from tests.emulator.counting import calls as calls_of
from tests.emulator.ranked import STEP, A, B, one_hot, token, write_plan

H100 = device_of(90, name="NVIDIA H100")


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> tuple[Path, schema.Plan]:
    return write_plan(tmp_path_factory.mktemp("ranks") / "plan", "all_reduce", 4 * VOCAB, count=3)


@contextmanager
def gpus(plan: tuple[Path, schema.Plan], *devices: Device) -> Iterator[list[State]]:
    """A machine with these GPUs."""
    held = launches.load(plan[0])
    states = [State(device, texts_of(plan[0], held), n) for n, device in enumerate(devices)]
    with driver.active(*states):
        yield states


def test_steps_of_three_ranks(plan) -> None:
    with gpus(plan, H100, H100, H100):
        executor = open_executor(*plan, 8)
        assert isinstance(executor, CudaRanks)
        for _ in range(3):
            logits = executor.step(STEP)
            np.testing.assert_array_equal(logits, sum(one_hot(token(A, r), token(B, r)) for r in range(3)))
        executor.close()
        executor.close()


def test_a_rank_takes_a_step_by_one_copy_and_the_first_alone_gives_logits(plan) -> None:
    with gpus(plan, H100, H100, H100), closing(CudaRanks(*plan, 8)) as executor:
        calls = [calls_of(e.gpu) for e in executor.executors]
        executor.step(STEP)
    copies = [[call for call in of if call[0].startswith("cuMemcpy")] for of in calls]
    inputs = ("cuMemcpyHtoDAsync", 3 * 128 + 128 + 32 + 16)  # of 32 tokens of 4 sequences
    assert copies == [[inputs, ("cuMemcpyDtoHAsync", 2 * 4 * VOCAB)], [inputs], [inputs]]


def test_memory_is_what_the_plan_says_and_all_of_it_is_given_back(plan) -> None:
    sizes = arena_bytes(launches.load(plan[0]), 8 * plan[1].kv.page_bytes)
    assert sizes[SHARED] == ranks.nbytes(3) == 4096 + 32 * 2 * 3 * 16384
    with gpus(plan, H100, H100, H100) as states:
        with closing(CudaRanks(*plan, 8)) as executor:
            assert [state.memory.used for state in states] == [sum(sizes.values())] * 3
            assert executor.num_blocks == 8
        assert [state.memory.used for state in states] == [0] * 3
    assert allocated(*plan, 8) == sum(sizes.values())


def test_the_cache_takes_what_the_fullest_gpu_has(plan) -> None:
    small = replace(H100, memory=64 << 20)
    taken = sum(arena_bytes(launches.load(plan[0]), 0).values())
    with gpus(plan, H100, small, H100):
        assert kv_memory(*plan, 0.5) == (32 << 20) - taken


def test_a_batch_that_does_not_fit_stops_no_rank(plan) -> None:
    with emulated(*plan, 8) as found:
        for batch_, says in ((batch([(list(range(40)), 0, [0, 1, 2])]), "fits no graph"), (wide(), "9 columns")):
            with pytest.raises(PlancError, match=rf"^[^;]*{says}"):
                found.executor.step(batch_)
        assert len(found.executor.step(STEP)) == 2


def wide() -> Batch:
    return replace(STEP, page_table=np.zeros((2, 9), np.int32))


def test_fewer_gpus_than_ranks(plan) -> None:
    for ask in (lambda: open_executor(*plan, 8), lambda: kv_memory(*plan, 0.9)):
        with gpus(plan, H100, H100), pytest.raises(PlancError, match=r"for 3 ranks, .* machine has 2 .*--tp 2"):
            ask()


def test_a_gpu_of_another_kind(plan) -> None:
    other, old = replace(H100, name="NVIDIA H200"), device_of(80, name="NVIDIA A100")
    with gpus(plan, H100, H100, other), pytest.raises(PlancError, match="rank 2 would run on GPU 2, NVIDIA H200, and"):
        open_executor(*plan, 8)
    with gpus(plan, H100, old, H100), pytest.raises(PlancError, match=r"rank 1: .* this GPU is NVIDIA A100 \(sm_80\)"):
        open_executor(*plan, 8)


def test_too_little_memory_names_the_rank(plan) -> None:
    small = replace(H100, memory=3 << 20)
    with (
        gpus(plan, H100, small, H100) as states,
        pytest.raises(PlancError, match=r"rank 1: \d+ bytes for what ranks share do not fit into .*: \d+ of 3145728"),
    ):
        open_executor(*plan, 8)
    assert [state.memory.used for state in states] == [0] * 3, "what the others had is given back"


def test_a_rank_that_fails_is_named_and_ends_the_others(plan) -> None:
    """Rank 1 may not write to its peers; they wait for it, and no step follows."""
    with emulated(*plan, 8) as found:
        executor = found.executor
        assert isinstance(executor, EmulatedRanks)
        executor.step(STEP)
        state = executor.states[1]
        state.reach = {handle: [Reach(x.pointers) for x in graph] for handle, graph in state.reach.items()}
        says = r"rank 0: .*waits for ever: .* a store .*; rank 1: .*a store of .* is by no pointer of the launch"
        with pytest.raises(PlancError, match=says):
            executor.step(STEP)
        with pytest.raises(PlancError, match=r"rank 1: .*; open the plan again"):
            executor.step(STEP)


# --- GPUs that cannot reach each other's memory

APART = replace(H100, peers=False)


class FakeNccl(ModuleType):
    """What planc uses of nccl4py, on emulated GPUs: moves are captured, and happen when all ranks have come to them."""

    class NCCLError(Exception):
        pass

    def __init__(self, states: list[State]) -> None:
        super().__init__("nccl.bindings.nccl")
        self.states, self.ended = states, list[int]()
        self.moves = Counter[str]()

    def comm_init_all(self, count: int, devices: list[int]) -> list[int]:
        assert devices == list(range(count)) == list(range(len(self.states)))
        return devices

    def comm_destroy(self, rank: int) -> None:
        assert not any(isinstance(h, Graph) for state in self.states for h in state.handles.values()), "it would wait"
        self.ended.append(rank)

    def group_start(self) -> None:
        self.group: list[tuple[str, int, int, int, int]] = []

    def all_gather(self, send: int, recv: int, count: int, kind: int, rank: int, stream: int) -> None:
        assert kind == 7
        self.group.append(("all_gather", send, recv, count, stream))

    def allto_all(self, send: int, recv: int, count: int, kind: int, rank: int, stream: int) -> None:
        assert kind == 7
        self.group.append(("allto_all", send, recv, count, stream))

    def group_end(self) -> None:
        group, came, done = self.group, [0] * len(self.states), [0]
        assert len(group) == len(self.states)
        assert len({(op, count) for op, _, _, count, _ in group}) == 1

        def meet(rank: int) -> Iterator[bool]:
            came[rank] += 1
            this = came[rank]
            while min(came) < this:
                yield False
            if done[0] < this:
                done[0] = this
                self.move(group)

        for rank, (*_, stream) in enumerate(group):
            self.states[rank].enqueue(stream, lambda rank=rank: meet(rank))

    def move(self, group: list[tuple[str, int, int, int, int]]) -> None:
        op, _, _, count, _ = group[0]
        self.moves[op] += 1
        slices = 1 if op == "all_gather" else len(group)
        sent = [
            state.memory.take(places(send, count * slices), 4).reshape(slices, count)
            for state, (_, send, *_) in zip(self.states, group, strict=True)
        ]
        for rank, (state, (_, _, recv, *_)) in enumerate(zip(self.states, group, strict=True)):
            parts = np.concatenate([part[rank % slices] for part in sent])
            state.memory.store(places(recv, parts.size), parts, 4)


def places(address: int, count: int) -> np.ndarray:
    return np.uint64(address) + np.arange(count, dtype=np.uint64) * np.uint64(4)


@contextmanager
def apart(plan: tuple[Path, schema.Plan], monkeypatch) -> Iterator[tuple[CudaRanks, FakeNccl]]:
    with gpus(plan, APART, APART, APART) as states:
        nccl = FakeNccl(states)
        monkeypatch.setitem(sys.modules, "nccl.bindings.nccl", nccl)
        with closing(CudaRanks(*plan, 8)) as executor:
            yield executor, nccl
        assert sorted(nccl.ended) == [0, 1, 2]
        assert [state.memory.used for state in states] == [0] * 3


@pytest.mark.parametrize(
    ("one_shot", "piece", "moves"),
    [
        (1 << 20, None, {"all_gather": 1}),
        (0, None, {"allto_all": 1, "all_gather": 2}),  # an exchange, a gather of its sums, one of what is left over
        (0, 100, {"allto_all": 4, "all_gather": 5}),  # in pieces of 100 elements a rank
    ],
)
def test_nccl_moves_and_kernels_add(tmp_path, monkeypatch, one_shot: int, piece: int | None, moves: dict) -> None:
    plan = write_plan(tmp_path / "plan", "all_reduce", 4 * VOCAB - 1, count=3)
    monkeypatch.setattr(ranks, "_ONE_SHOT", ((16, one_shot),))
    if piece:
        monkeypatch.setattr(ranks, "nbytes", lambda count: ranks.STAGING + 4 * piece * count)
    with apart(plan, monkeypatch) as (executor, nccl):
        for _ in range(2):
            logits = executor.step(STEP)
            np.testing.assert_array_equal(logits, sum(one_hot(token(A, r), token(B, r)) for r in range(3)))
        assert nccl.moves == {op: 2 * count for op, count in moves.items()}


def test_nccl_gathers(tmp_path, monkeypatch) -> None:
    plan = write_plan(tmp_path / "plan", "all_gather", VOCAB, count=3)
    with apart(plan, monkeypatch) as (executor, nccl):
        np.testing.assert_array_equal(executor.step(STEP), one_hot(token(A, 0), token(A, 1)))
        assert nccl.moves == {"all_gather": 1}


def test_gpus_apart_without_nccl(plan, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "nccl.bindings.nccl", None)
    says = r"GPU 0 cannot reach the memory of GPU 1, so that ranks need NCCL \(.*pip install 'planc\[nccl\]'"
    with gpus(plan, APART, APART, APART) as states, pytest.raises(PlancError, match=says):
        open_executor(*plan, 8)
    assert [state.memory.used for state in states] == [0] * 3


def test_nccl_that_fails_is_told(plan, monkeypatch) -> None:
    def missing(count: int, devices: list[int]) -> list[int]:
        raise RuntimeError("libnccl.so.2 cannot be found")

    monkeypatch.setattr(FakeNccl, "comm_init_all", staticmethod(missing))
    with (
        pytest.raises(PlancError, match=r"starting NCCL failed: libnccl.so.2 .*'planc\[nccl\]'"),
        apart(plan, monkeypatch),
    ):
        pass
