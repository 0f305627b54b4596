"""One step's input: scheduled chunks go in, the packed int32 arrays of the plan's C API come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from planc.runtime.scheduler import Chunk

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    """The packed tokens of one step, all arrays int32 and C-contiguous.

    ids, positions, slots [T]; page_table [S, M] (entries past a sequence's pages are unspecified); query_start [S+1];
    logit_rows [R]. slot = page * block_size + offset. Sequence s owns tokens query_start[s] .. query_start[s+1]-1.
    """

    ids: Int32
    positions: Int32
    slots: Int32
    page_table: Int32
    query_start: Int32
    logit_rows: Int32


@dataclass(frozen=True)
class Piece:
    """Tokens `ids` at positions `start`.. of a sequence whose pages are numbered from `page`, one after the other."""

    ids: Sequence[int]
    start: int
    page: int


def packed(pieces: Sequence[Piece], block_size: int, every_row: bool = False) -> Batch:
    """A step of pieces, without a scheduler; logits of every token, or of each piece's last."""
    ends = np.cumsum([len(p.ids) for p in pieces], dtype=np.int32)
    positions = np.concatenate([np.arange(p.start, p.start + len(p.ids), dtype=np.int32) for p in pieces])
    first = np.repeat([p.page for p in pieces], [len(p.ids) for p in pieces]).astype(np.int32)
    width = int(positions.max()) // block_size + 1
    return Batch(
        ids=np.concatenate([np.asarray(p.ids, np.int32) for p in pieces]),
        positions=positions,
        slots=first * np.int32(block_size) + positions,
        page_table=np.array([range(p.page, p.page + width) for p in pieces], np.int32),
        query_start=np.concatenate([[0], ends]).astype(np.int32),
        logit_rows=np.arange(ends[-1], dtype=np.int32) if every_row else ends - np.int32(1),
    )


class Executor(Protocol):
    """Runs the model. Owns weights, KV cache and activations; knows pages and tokens, not requests."""

    num_blocks: int
    block_size: int
    vocab_size: int

    def step(self, batch: Batch) -> NDArray[np.float32]:
        """Logits [R, vocab_size] of batch.logit_rows; the array is overwritten by the next step."""
        ...

    def close(self) -> None:
        """Free what the executor holds. Doing it twice is harmless."""
        ...


class BatchBuilder:
    """Fills preallocated arrays, so that a step allocates nothing."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._ids = np.zeros(max_num_batched_tokens, np.int32)
        self._positions = np.zeros(max_num_batched_tokens, np.int32)
        self._slots = np.zeros(max_num_batched_tokens, np.int32)
        self._table = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._start = np.zeros(max_num_seqs + 1, np.int32)
        self._rows = np.zeros(max_num_seqs, np.int32)
        self._counting = np.arange(max_blocks * block_size, dtype=np.int32)

    def fill(self, chunks: Sequence[Chunk]) -> Batch:
        """The batch of `chunks`; its arrays are views that the next call overwrites."""
        at = rows = 0
        for s, chunk in enumerate(chunks):
            self._put(s, at, chunk)
            at += chunk.count
            self._start[s + 1] = at
            wanted = chunk.rows
            if wanted == 1:
                self._rows[rows] = at - 1
            elif wanted:
                self._rows[rows : rows + wanted] = range(at - wanted, at)
            rows += wanted
        count = len(chunks)
        return Batch(
            self._ids[:at],
            self._positions[:at],
            self._slots[:at],
            self._table[:count],
            self._start[: count + 1],
            self._rows[:rows],
        )

    def _put(self, s: int, at: int, chunk: Chunk) -> None:
        start, end, held = chunk.start, chunk.end, chunk.seq.pages
        row = self._table[s]
        row[: len(held)] = held
        if chunk.count == 1:
            page, offset = divmod(start, self.block_size)
            self._ids[at] = chunk.seq.tokens[start]
            self._positions[at] = start
            self._slots[at] = held[page] * self.block_size + offset
            return
        here, positions = slice(at, at + chunk.count), self._counting[start:end]
        pages, offsets = np.divmod(positions, self.block_size)
        self._ids[here] = chunk.seq.tokens[start:end]
        self._positions[here] = positions
        self._slots[here] = row[pages] * self.block_size + offsets
