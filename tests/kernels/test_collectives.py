"""Collectives against their references: every rank's threads run at once, over one memory, as processes would."""

import ctypes
import threading

import numpy as np
import pytest

from planc.codegen.cpu import build_library
from planc.codegen.target import Target, parse
from planc.compiler.ir.ops import OPS
from tests.kernels.harness import TARGETS, Buffer, Case, assert_same_bits, case, f32, joined, random

HELPERS = """
extern "C" {
int64_t group_bytes(int ranks) { return planc::Group::bytes(ranks); }
void* group_open(void* memory, int rank, int ranks, int members) {
    auto* group = new planc::Group;
    group->join(memory, rank, ranks, members);
    return group;
}
void group_close(void* group) { delete static_cast<planc::Group*>(group); }
}
"""
REDUCE = case("all_reduce", f32("T", 3, 7), ranks=3)
LARGE = case("all_reduce", f32("T", 200_000), ranks=2)  # more than a slot holds: in rounds
GATHER = case("all_gather", f32("R", 21), ranks=3, starts=(0, 21, 33), size=54)  # the last two share columns
WIDE = case("all_gather", f32("R", 300_000), ranks=2, starts=(0, 300_000), size=600_000)  # a row larger than a slot
CASES = (REDUCE, LARGE, GATHER, WIDE)


class Ranks:
    """All ranks of a collective in this process."""

    def __init__(self, lib: ctypes.CDLL, target: Target) -> None:
        self.lib, self.target = lib, target
        lib.group_bytes.restype = ctypes.c_int64
        lib.group_open.restype = ctypes.c_void_p
        lib.group_open.argtypes = (ctypes.c_void_p, *[ctypes.c_int] * 3)
        lib.group_close.argtypes = (ctypes.c_void_p,)

    def run(
        self, c: Case, arrays: list[np.ndarray], *, threads: int = 2, times: int = 1, absent: int | None = None
    ) -> list[np.ndarray]:
        """Each rank's result of the last time; `absent` is a rank that never comes, and is then said to be gone."""
        ranks, rows = len(arrays), len(arrays[0])
        memory = np.zeros(self.lib.group_bytes(ranks) + 64, np.uint8)
        start = memory.ctypes.data + -memory.ctypes.data % 64
        groups = [self.lib.group_open(start, r, ranks, ranks * threads) for r in range(ranks)]
        shape = (rows, *(int(d) for d in c.node.out.type.shape[1:]))
        outs = [Buffer(int(np.prod(shape)) * 4) for _ in arrays]
        kernel = getattr(self.lib, c.kernel(self.target).name)

        def work(rank: int, thread: int) -> None:
            pointers = (arrays[rank].ctypes.data, outs[rank].data.ctypes.data, groups[rank])
            for _ in range(times):
                kernel((ctypes.c_void_p * 3)(*pointers), (ctypes.c_int32 * 4)(), rows, thread, threads)

        present = [r for r in range(ranks) if r != absent]
        pool = [threading.Thread(target=work, args=(r, t)) for r in present for t in range(threads)]
        for t in pool:
            t.start()
        if absent is not None:
            ctypes.c_uint32.from_address(start).value = 1
        for t in pool:
            t.join(30)
        assert not any(t.is_alive() for t in pool)
        for group, out in zip(groups, outs, strict=True):
            self.lib.group_close(group)
            out.check(str(c))
        return [out.data.view(np.float32).reshape(shape) for out in outs]


@pytest.fixture(scope="module", params=TARGETS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    target = parse(request.param)
    source = joined([c.kernel(target) for c in CASES]) + HELPERS
    path = build_library({"collectives.cpp": source}, target, tmp_path_factory.mktemp("kernels"))
    return Ranks(ctypes.CDLL(str(path)), target)


@pytest.mark.parametrize("c", CASES, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_rank_has_the_bits_of_the_reference(ranks: Ranks, c: Case, rows: int, threads: int) -> None:
    shape = (rows, *(int(d) for d in c.types[0].shape[1:]))
    arrays = [random(*shape, seed=r) for r in range(int(dict(c.attrs)["ranks"]))]
    if c.op == "all_gather":  # columns of two ranks hold the same in both
        whole = random(rows, int(dict(c.attrs)["size"]))
        arrays = [np.ascontiguousarray(whole[:, s : s + shape[-1]]) for s in dict(c.attrs)["starts"]]
    (want,) = OPS[c.op].ref(dict(c.attrs), arrays, c.types)
    for got in ranks.run(c, arrays, threads=threads, times=3):
        assert_same_bits(got, want, c)


def test_it_holds_over_many_steps(ranks: Ranks) -> None:
    """A slot is written again only when all have read it."""
    arrays = [random(2, 3, 7, seed=r) for r in range(3)]
    (want,) = OPS["all_reduce"].ref({"ranks": 3}, arrays, REDUCE.types)
    for got in ranks.run(REDUCE, arrays, times=400):
        assert_same_bits(got, want)


def test_it_may_write_over_its_input(ranks: Ranks) -> None:
    assert OPS["all_reduce"].inplace == 0
    arrays = [random(2, 200_000, seed=r) for r in range(2)]
    (want,) = OPS["all_reduce"].ref({"ranks": 2}, arrays, LARGE.types)
    kernel = getattr(ranks.lib, LARGE.kernel(ranks.target).name)
    memory = np.zeros(ranks.lib.group_bytes(2) + 64, np.uint8)
    start = memory.ctypes.data + -memory.ctypes.data % 64
    groups = [ranks.lib.group_open(start, r, 2, 2) for r in range(2)]

    def work(rank: int) -> None:
        at = arrays[rank].ctypes.data
        kernel((ctypes.c_void_p * 3)(at, at, groups[rank]), (ctypes.c_int32 * 4)(), 2, 0, 1)

    pool = [threading.Thread(target=work, args=(r,)) for r in range(2)]
    for t in pool:
        t.start()
    for t in pool:
        t.join()
    for group, got in zip(groups, arrays, strict=True):
        ranks.lib.group_close(group)
        assert_same_bits(got, want)


def test_nobody_waits_for_a_rank_that_is_gone(ranks: Ranks) -> None:
    ranks.run(REDUCE, [random(2, 3, 7, seed=r) for r in range(3)], absent=2, times=3)
