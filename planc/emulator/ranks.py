"""A plan of several ranks on as many emulated GPUs: in go batches, out come the logits that all ranks agree on.

The ranks run in turn, each as far as the next collective, which is then done for all of them on the host: sums in the
order of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planc.emulator.device import State
from planc.errors import PlancError
from planc.runtime.batch import Batch, Int32
from planc.runtime.cuda import Collective, CudaExecutor


class EmulatedRanks:
    """Executors of all ranks as one."""

    def __init__(self, executors: Sequence[CudaExecutor], states: Sequence[State]) -> None:
        self.executors, self.states = executors, states
        first = executors[0]
        self.samples = first.samples
        self.num_blocks, self.block_size, self.vocab_size = first.num_blocks, first.block_size, first.vocab_size

    def step(self, batch: Batch) -> NDArray[np.float32]:
        """Run one step on every rank; logits [R, vocab_size]. PlancError when the ranks part or disagree."""
        self._run([executor.run(batch) for executor in self.executors])
        return _agreed("logits", [executor.logits(len(batch.logit_rows)) for executor in self.executors])

    def sample_step(
        self, batch: Batch, records: Int32, *, with_logits: bool = False
    ) -> tuple[Int32, NDArray[np.float32]]:
        """Run one step on every rank, each of which chooses the tokens; see CudaExecutor."""
        self._run([executor.run(batch, records, with_logits) for executor in self.executors])
        tokens = _agreed("tokens", [executor.sampled(len(records)) for executor in self.executors])
        return tokens, _agreed("logits", [executor.logits(len(records)) for executor in self.executors])

    def _run(self, running: Sequence[Iterator[Collective]]) -> None:
        """All ranks to their end, collective by collective."""
        while True:
            met = [next(run, None) for run in running]
            if met[0] is None:
                break
            self._together(met)

    def close(self) -> None:
        """Give everything on the GPUs back."""
        for executor in self.executors:
            executor.close()

    def _together(self, met: Sequence[Collective | None]) -> None:
        """One collective of all ranks."""
        parts: list[NDArray[Any]] = []
        for rank, (collective, executor, state) in enumerate(zip(met, self.executors, self.states, strict=True)):
            first = met[0]
            if collective is None or first is None or (collective.op, collective.count) != (first.op, first.count):
                raise PlancError(f"rank {rank} comes to {collective}, rank 0 to {first}; expected the same collective")
            executor.synchronize()
            self._held(state, collective.source, 4 * collective.count, rank, collective)
            parts.append(state.memory.get(collective.source, (collective.count,), np.float32))
        for rank, (collective, state) in enumerate(zip(met, self.states, strict=True)):
            assert collective is not None
            result = sum(parts[1:], parts[0]) if collective.op == "all_reduce" else np.concatenate(parts)
            self._held(state, collective.target, result.nbytes, rank, collective)
            state.memory.set(collective.target, result)

    @staticmethod
    def _held(state: State, address: int, nbytes: int, rank: int, collective: Collective) -> None:
        if not state.memory.holds(address, nbytes):
            raise PlancError(
                f"{collective.op} of rank {rank} touches {nbytes} bytes that are not within one allocation"
            )


def _agreed(what: str, found: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """What all ranks have."""
    for rank, own in enumerate(found):
        if not np.array_equal(own, found[0], equal_nan=own.dtype.kind == "f"):
            raise PlancError(f"the {what} of rank {rank} differ from those of rank 0, expected equal ones")
    return found[0]
