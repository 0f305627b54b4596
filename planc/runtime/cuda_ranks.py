"""A plan of several ranks on the GPUs of this machine: in go steps, which every GPU takes; out come logits of one.

One process drives all of them. Each rank's step is started before any is waited for, since its kernels wait for those
of the others. They read and write the others' memory, or NCCL moves between them what they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planc.errors import PlancError
from planc.plans import launches
from planc.plans.ranks import SHARED
from planc.plans.schema import Plan
from planc.runtime.batch import Batch, Int32
from planc.runtime.cuda import CudaExecutor
from planc.runtime.cuda import kv_memory as kv_memory_of_one
from planc.runtime.cuda_driver import Driver, Gpu
from planc.runtime.nccl import Instead, Nccl, library


class CudaRanks:
    """Runs a plan of several ranks, rank r on GPU r.

    PlancError when there are fewer GPUs than ranks, when they differ, when they cannot reach each other and there is no
    NCCL, or for what the executor of one rank refuses, with its number.
    """

    def __init__(self, root: Path, plan: Plan, num_blocks: int) -> None:
        self.executors: list[CudaExecutor] = []
        self._nccl: Nccl | None = None
        self._failure: str | None = None
        apart = _check(root, plan)
        api = library(apart) if apart else None
        try:
            self._open(root, plan, num_blocks)
            if api:
                self._nccl = Nccl(api, self.executors)
                self._build(self._nccl.instead())
            else:
                _join(self.executors)
                self._build([{}] * len(self.executors))
        except BaseException:
            self.close()
            raise
        first = self.executors[0]
        self.samples = first.samples
        self.num_blocks, self.block_size, self.vocab_size = first.num_blocks, first.block_size, first.vocab_size

    def _open(self, root: Path, plan: Plan, num_blocks: int) -> None:
        """The executors of all ranks, at once: most of their time goes to copies of weights, each over its own link."""

        def opened(rank: int) -> CudaExecutor:
            with _named(rank):
                return CudaExecutor(root, plan, num_blocks, rank, rank)

        ranks = range(plan.limits.ranks)
        with ThreadPoolExecutor(len(ranks), thread_name_prefix="planc-rank") as pool:
            futures = [pool.submit(opened, rank) for rank in ranks]
        self.executors = [f.result() for f in futures if f.exception() is None]
        for future in futures:
            future.result()  # raises what the first rank that failed has said

    def step(self, batch: Batch) -> NDArray[np.float32]:
        """Run one step; logits [R, vocab_size], overwritten by the next one."""
        self._run(batch)
        return self.executors[0].logits(len(batch.logit_rows))

    def sample_step(
        self, batch: Batch, records: Int32, *, with_logits: bool = False
    ) -> tuple[Int32, NDArray[np.float32]]:
        """Run one step whose rows are chosen by `records`; see CudaExecutor. Every rank chooses alike."""
        self._run(batch, records, with_logits)
        return self.executors[0].sampled(len(records)), self.executors[0].logits(len(records))

    def _run(self, batch: Batch, records: Int32 | None = None, with_logits: bool = False) -> None:
        if self._failure is not None:
            raise PlancError(f"{self._failure}; open the plan again")
        self.executors[0].fitting(batch)  # before any rank starts: a batch that does not fit must stop none
        self._each(lambda executor: executor.launch(batch, records, with_logits))
        self._each(CudaExecutor.finish)

    def _each(self, do: Callable[[CudaExecutor], None]) -> None:
        """On all ranks; of those that fail all are told, since who fails first need not be at fault."""
        wrong: list[str] = []
        for rank, executor in enumerate(self.executors):
            try:
                with _named(rank):
                    do(executor)
            except PlancError as e:
                wrong.append(str(e))
        if wrong:
            self._failure = "; ".join(wrong)
            raise PlancError(self._failure)

    def _build(self, instead: Sequence[Instead]) -> None:
        for rank, executor in enumerate(self.executors):
            with _named(rank):
                executor.build(instead[rank])

    def close(self) -> None:
        """Give everything on the GPUs back."""
        try:
            if self._nccl is not None:
                for executor in self.executors:  # NCCL ends when the graphs have that it is in
                    executor.end_graphs()
                self._nccl.close()
        finally:
            for executor in self.executors:
                executor.close()


def kv_memory(root: Path, plan: Plan, utilization: float) -> int:
    """Bytes for the KV cache of a rank, as many as the fullest GPU has; see cuda.kv_memory."""
    _check(root, plan)
    found = []
    for rank in range(plan.limits.ranks):
        with _named(rank):
            found.append(kv_memory_of_one(root, plan, utilization, rank))
    return min(found)


def _check(root: Path, plan: Plan) -> str:
    """Refuses a machine whose GPUs are not those of the plan, before anything is loaded; says which of them cannot
    reach another.
    """
    driver, held, count = Driver(), launches.load(root), plan.limits.ranks
    have = driver.start(plan.target)
    if have < count:
        raise PlancError(
            f"the plan is for {count} ranks, a GPU each, and this machine has {have} (see CUDA_VISIBLE_DEVICES); build "
            f"it with --tp {have or 1}, if the model fits"
        )
    gpus: list[Gpu] = []
    try:
        for rank in range(count):
            with _named(rank):
                gpus.append(Gpu(driver, held.sm, plan.target, rank))
        _check_equal(gpus)
        return next(_apart(gpus), "")
    finally:
        for gpu in gpus:
            gpu.close()


def _check_equal(gpus: Sequence[Gpu]) -> None:
    for rank, gpu in enumerate(gpus):
        if gpu.name != gpus[0].name:
            raise PlancError(
                f"rank {rank} would run on GPU {rank}, {gpu.name}, and rank 0 on {gpus[0].name}; ranks take GPUs of "
                "one kind, choose them with CUDA_VISIBLE_DEVICES"
            )


def _apart(gpus: Sequence[Gpu]) -> Iterator[str]:
    """What says of two GPUs that one does not reach the other's memory."""
    for rank, gpu in enumerate(gpus):
        for peer, other in enumerate(gpus):
            if rank != peer and not gpu.reaches(other):
                yield f"GPU {rank} cannot reach the memory of GPU {peer}"


def _join(executors: Sequence[CudaExecutor]) -> None:
    """Lets all GPUs reach each other's memory, and tells each where the others' is."""
    for one in executors:
        for other in executors:
            if one is not other:
                one.gpu.reach(other.gpu)
    acts, shared = ([e.arenas.start[name] for e in executors] for name in ("act", SHARED))
    for executor in executors:
        executor.share(acts, shared)


@contextmanager
def _named(rank: int) -> Iterator[None]:
    """Errors say which rank they are of."""
    try:
        yield
    except PlancError as e:
        raise PlancError(f"rank {rank}: {e}") from e
