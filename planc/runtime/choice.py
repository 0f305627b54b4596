"""Token choice on the device: a sequence goes in, the record that its row of logits is chosen by comes out, and back.

A row is chosen on the device unless its logits are wanted themselves (log probabilities), or its parameters do not fit
a record: a list of allowed tokens, or more than MOST_EDITS biased and forbidden ones. Such rows alone are copied.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from planc.plans import sampling
from planc.runtime.batch import Batch, Int32
from planc.runtime.sampler import NotFinite, uniform
from planc.runtime.scheduler import Chunk
from planc.runtime.sequence import SamplingParams
from planc.runtime.sequence import Sequence as Stream

_MOST_TOP_K = 2**31 - 1
_MOST_BIAS = float(np.finfo(np.float32).max)  # what is infinite in a record forbids the token, whatever its logit
_LEAST_TOP_P = 2.0**-64  # a smaller share is none of a record's units; it leaves the best token, as this one does


@dataclass(frozen=True, slots=True)
class Choice:
    """What the device chose for a row, and the best of its logits."""

    token: int
    best: float


Outcome = NDArray[np.float32] | Choice  # of a row: its logits [vocab_size], which the next step overwrites, or a token


@runtime_checkable
class SamplingExecutor(Protocol):
    """An executor that can choose tokens where the logits are; `samples` says whether its plan has the kernels."""

    samples: bool

    def sample_step(self, batch: Batch, records: Int32) -> tuple[Int32, NDArray[np.float32]]:
        """Runs a step whose rows are chosen by `records` [R, RECORD].

        What was chosen [R, 2], a token and the bits of the best logit; and logits [R, vocab_size], which hold the rows
        whose record says HOST alone. Both are overwritten by the next step.
        """
        ...


_PLACES = (sampling.SEQUENCE, sampling.LENGTH, sampling.PROMPT)


def _wants_best(seq: Stream) -> bool:
    """Whether a sequence wants its best token, and nothing changes or reports its logits."""
    p = seq.params
    plain = p.repetition_penalty == 1.0 and p.presence_penalty == 0.0 and p.frequency_penalty == 0.0
    free = not p.logit_bias and p.allowed_token_ids is None and seq.output_len >= p.min_tokens
    return p.greedy and plain and free and p.logprobs is None and p.prompt_logprobs is None


class Recorder:
    """Fills the records of a step, in memory that is used again."""

    def __init__(self, max_rows: int, eos_token_ids: Collection[int]) -> None:
        self._records = np.zeros((max_rows, sampling.RECORD), np.int32)
        self._eos_token_ids = eos_token_ids
        self._best = np.zeros(sampling.RECORD, np.int32)
        self._best[sampling.KIND] = sampling.GREEDY
        self._best.view(np.float32)[sampling.REPETITION] = 1.0

    def fill(self, chunks: Sequence[Chunk]) -> Int32:
        """A record for each row of the chunks [R, RECORD]; the next call overwrites it."""
        rows = 0
        best: list[tuple[int, int, int, int]] = []  # rows that want the best token, which are written together
        for number, chunk in enumerate(chunks):
            for _ in range(chunk.rows):
                if _wants_best(chunk.seq):
                    best.append((rows, number, len(chunk.seq.tokens), chunk.seq.prompt_len))
                else:
                    write(self._records[rows], chunk.seq, number, self._eos_token_ids)
                rows += 1
        if best:
            at, *values = np.array(best, np.int32).T
            self._records[at] = self._best
            for place, value in zip(_PLACES, values, strict=True):
                self._records[at, place] = value
        return self._records[:rows]


def chosen(records: Int32, found: Int32, logits: NDArray[np.float32]) -> list[Outcome]:
    """What an executor gave, row by row."""
    tokens, best = found[:, 0].tolist(), found.view(np.float32)[:, 1].tolist()
    on_host = records[:, sampling.KIND] == sampling.HOST
    return [logits[row] if on_host[row] else Choice(tokens[row], best[row]) for row in range(len(records))]


def token_of(choice: Choice, seq: Stream) -> int:
    """The token; NotFinite when the logits hold a NaN or leave no token possible."""
    if not np.isfinite(choice.best):
        raise NotFinite(len(seq.tokens), choice.best)
    return choice.token


def write(record: Int32, seq: Stream, number: int, eos_token_ids: Collection[int]) -> None:
    """Fills one record for the next token of a sequence whose row of the page table is `number`."""
    params = seq.params
    edits = _edits(seq, eos_token_ids)
    record[: sampling.LIST] = 0
    if params.logprobs is not None or params.prompt_logprobs is not None or edits is None:
        return  # sampling.HOST is 0
    record[sampling.KIND] = sampling.GREEDY if params.greedy else sampling.DRAWN
    record[sampling.SEQUENCE], record[sampling.LENGTH] = number, len(seq.tokens)
    record[sampling.PROMPT], record[sampling.EDITS] = seq.prompt_len, len(edits)
    reals = record.view(np.float32)
    reals[sampling.REPETITION] = params.repetition_penalty
    reals[sampling.PRESENCE], reals[sampling.FREQUENCY] = params.presence_penalty, params.frequency_penalty
    for at, (token, added) in enumerate(edits):
        record[sampling.LIST + 2 * at], reals[sampling.LIST + 2 * at + 1] = token, added
    if not params.greedy:
        _write_draw(record, params, uniform(seq.seed, seq.sample, len(seq.tokens)))


def _write_draw(record: Int32, params: SamplingParams, u: float) -> None:
    reals, shares = record.view(np.float32), record.view(np.uint64)
    record[sampling.TOP_K] = min(max(params.top_k, 0), _MOST_TOP_K)
    reals[sampling.TEMPERATURE], reals[sampling.MIN_P] = params.temperature, params.min_p
    shares[sampling.UNIFORM // 2] = int(u * 2**64)
    shares[sampling.TOP_P // 2] = int(max(params.top_p, _LEAST_TOP_P) * 2**64) if params.top_p < 1 else 0


def _edits(seq: Stream, eos_token_ids: Collection[int]) -> list[tuple[int, float]] | None:
    """What is added to the logits of single tokens, in order; None when there is no room for it in a record."""
    params = seq.params
    edits = [(token, max(-_MOST_BIAS, min(bias, _MOST_BIAS))) for token, bias in params.logit_bias]
    if seq.output_len < params.min_tokens:
        edits += [(token, -np.inf) for token in (*eos_token_ids, *params.stop_token_ids)]
    return None if params.allowed_token_ids or len(edits) > sampling.MOST_EDITS else edits
