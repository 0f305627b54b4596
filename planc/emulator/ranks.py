"""Plans of several ranks on as many emulated GPUs: in go batches, out come the logits that all ranks agree on.

The executor is that of real GPUs, which looks at the results of rank 0 alone; here those of all are compared. A
collective can also be run by itself.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planc.emulator.device import Device, Failure, Function, Module, Pointer, Reach, State
from planc.emulator.machine import Grid, KernelFault
from planc.errors import PlancError
from planc.plans import ranks as shared
from planc.plans import sampling
from planc.plans.launches import Binary
from planc.runtime.batch import Batch, Int32
from planc.runtime.cuda_ranks import CudaRanks


class EmulatedRanks:
    """All ranks as one executor. PlancError when they disagree."""

    def __init__(self, ranks: CudaRanks, states: Sequence[State]) -> None:
        self.ranks, self.states = ranks, states
        self.samples = ranks.samples
        self.num_blocks, self.block_size, self.vocab_size = ranks.num_blocks, ranks.block_size, ranks.vocab_size

    def step(self, batch: Batch) -> NDArray[np.float32]:
        """Run one step on every rank; logits [R, vocab_size]."""
        logits = self.ranks.step(batch)
        self._agree("logits", self.ranks.executors[0].plan.logits, (len(logits), self.vocab_size))
        return logits

    def sample_step(
        self, batch: Batch, records: Int32, *, with_logits: bool = False
    ) -> tuple[Int32, NDArray[np.float32]]:
        """Run one step on every rank, each of which chooses the tokens; see CudaExecutor."""
        tokens, logits = self.ranks.sample_step(batch, records, with_logits=with_logits)
        self._agree("logits", self.ranks.executors[0].plan.logits, (len(logits), self.vocab_size))
        self._agree("tokens", sampling.SAMPLED, tokens.shape)
        return tokens, logits

    def close(self) -> None:
        """Give everything on the GPUs back."""
        self.ranks.close()

    def _agree(self, what: str, buffer: str, shape: tuple[int, ...]) -> None:
        found: list[NDArray[Any]] = [
            state.memory.get(executor.arenas.address(buffer), shape, np.int32)  # the bits of what is compared
            for executor, state in zip(self.ranks.executors, self.states, strict=True)
        ]
        for rank, own in enumerate(found):
            if not np.array_equal(own, found[0]):
                raise PlancError(f"the {what} of rank {rank} differ from those of rank 0, expected equal ones")


class Together:
    """GPUs of ranks on which collectives run by themselves, one after the other, in `nbytes` of activations each."""

    def __init__(self, device: Device, ranks: int, nbytes: int, seed: int = 0) -> None:
        self.states = [State(device, {}, seed + rank) for rank in range(ranks)]
        self._shared_bytes = shared.nbytes(ranks)
        self.acts = [state.alloc(nbytes) for state in self.states]
        self.shared = [state.alloc(self._shared_bytes) for state in self.states]
        for rank, state in enumerate(self.states):
            state.group = self.states
            state.memory.peers += [other.memory for other in self.states if other is not state]
            head = shared.table(rank, self.acts, self.shared).ljust(shared.STAGING, b"\0")
            state.memory.set(self.shared[rank], np.frombuffer(head, np.uint8))

    def run(
        self, image: bytes, text: str, binary: Binary, messages: Sequence[Sequence[NDArray[Any]]], to: int = 0
    ) -> list[list[NDArray[np.float32]]]:
        """What each rank has of each message, at byte `to` of its activations, when each sends its part, at byte 0.

        No rank waits for another between two messages. KernelFault on a wrong access, or when one waits for ever.
        """
        digest, results = hashlib.sha256(image).hexdigest(), list[list[NDArray[np.float32]]]()
        for rank, state in enumerate(self.states):
            state.texts = {digest: text}
            kernel = state.get(state.function(state.get(state.load(image), Module), binary.entry), Function)
            results.append([])
            for parts in messages:
                self._enqueue(rank, kernel, binary, parts[rank], to, results[-1])
        try:
            for state in self.states:
                state.synchronize(0)
        except Failure as e:
            raise KernelFault(e.text) from None
        return [list(found) for found in zip(*results, strict=True)]

    def _enqueue(
        self, rank: int, kernel: Function, binary: Binary, part: NDArray[Any], to: int, results: list[Any]
    ) -> None:
        """One rank's part, its launch, and the copy of what it gives."""
        state, act, own, n = self.states[rank], self.acts[rank], self.shared[rank], part.size
        out = n * (len(self.states) if binary.entry == "all_gather" else 1)
        params = [struct.pack("<Q", value) for value in (act, act + to, n, own)]
        node = state.node(kernel, Grid((shared.blocks(n), 1, 1), binary.threads, binary.shared), params)
        reach = self._reach(rank, 4 * n, to, 4 * out)
        state.enqueue(0, lambda: state.memory.set(act, part))
        state.enqueue(0, lambda: state.launch(node, reach))
        state.enqueue(0, lambda: results.append(state.memory.get(act + to, (out,), np.float32)))

    def _reach(self, rank: int, part: int, to: int, out: int) -> Reach:
        """A rank's part, result and shared memory, and those of its peers."""

        def of(r: int, number: int) -> list[Pointer]:
            act, own = self.acts[r], self.shared[r]
            return [
                Pointer(0, act, act + part, f"the part of rank {r}"),
                Pointer(1, act + to, act + to + out, f"the result of rank {r}"),
                Pointer(number, own, own + self._shared_bytes, f"what rank {r} shares"),
            ]

        peers = [p for r in range(len(self.states)) for p in of(r, -1) if r != rank or p.number == -1]
        return Reach(of(rank, 3), peers)
