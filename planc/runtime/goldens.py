"""Goldens: in goes a plan, out comes whether it still generates the tokens that it was published with."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planc.plans.schema import Golden, Plan
from planc.runtime.batch import Batch, Executor

TIE = 1e-3  # a reference margin below which another instruction set may round to the other token


class Scorer:
    """Runs a plan on one sequence at a time, alone in the cache, pages in order."""

    def __init__(self, executor: Executor, max_rows: int, max_tokens: int) -> None:
        self._executor = executor
        self._max_rows = max_rows
        self._max_tokens = max_tokens

    def logits(self, ids: list[int], start: int) -> np.ndarray:
        """Logits [n, vocab] after each of `ids`, which follow the `start` tokens that the cache already holds."""
        return np.concatenate([self._step(ids[a:b], start + a) for a, b in self._pieces(len(ids))])

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Greedy tokens after a prompt, `count` of them; stop tokens do not stop it."""
        tokens = list(prompt)
        last = self.logits(tokens, 0)[-1]
        for _ in range(count):
            tokens.append(int(last.argmax()))
            last = self.logits(tokens[-1:], len(tokens) - 1)[-1]
        return tokens[len(prompt) :]

    def _pieces(self, n: int) -> Iterator[tuple[int, int]]:
        size = min(self._max_rows, self._max_tokens)
        return ((a, min(a + size, n)) for a in range(0, n, size))

    def _step(self, ids: list[int], start: int) -> np.ndarray:
        n, block = len(ids), self._executor.block_size
        positions = np.arange(start, start + n, dtype=np.int32)
        pages = np.arange(-(-(start + n) // block), dtype=np.int32)
        batch = Batch(
            ids=np.asarray(ids, np.int32),
            positions=positions,
            slots=positions.copy(),  # page i is block i, so a token's slot is its position
            page_table=pages[None].copy(),
            query_start=np.array([0, n], np.int32),
            logit_rows=np.arange(n, dtype=np.int32),
        )
        return self._executor.step(batch).copy()


@dataclass(frozen=True)
class Verdict:
    """One golden: the tokens that the plan makes now, and the index of the first that differs (None: all equal).

    `tied` is True when it differs only from a token on whose choice the reference itself was undecided.
    """

    golden: Golden
    tokens: tuple[int, ...]
    differs_at: int | None
    tied: bool

    @property
    def ok(self) -> bool:
        return self.differs_at is None or self.tied


def verify(plan: Plan, executor: Executor) -> Iterator[Verdict]:
    """Runs each golden of the plan alone, greedily."""
    scorer = Scorer(executor, plan.limits.max_num_seqs, plan.limits.max_num_batched_tokens)
    for golden in plan.goldens:
        yield _verdict(golden, tuple(scorer.greedy(list(golden.prompt_ids), len(golden.tokens))))


def _verdict(golden: Golden, tokens: tuple[int, ...]) -> Verdict:
    pairs = enumerate(zip(tokens, golden.tokens, strict=True))
    at = next((i for i, (new, old) in pairs if new != old), None)
    tied = at is not None and at < len(golden.margins) and golden.margins[at] < TIE
    return Verdict(golden, tokens, at, tied)
