"""Goldens: in goes a plan, out comes whether it still generates the tokens that it was published with."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planc.errors import PlancError
from planc.plans.schema import Golden, Plan
from planc.runtime.batch import Executor, Piece, packed

TIE = 0.005  # a reference margin (kept to 0.01) below which another instruction set may choose the other token


class Scorer:
    """Runs a plan on sequences that it is given, without a scheduler: each has its pages in a row."""

    def __init__(self, executor: Executor, max_rows: int, max_tokens: int) -> None:
        """`max_rows` and `max_tokens` are the plan's max_num_seqs and max_num_batched_tokens, or less."""
        self._executor = executor
        self._max_rows = max_rows
        self._max_tokens = max_tokens

    def logits(self, ids: Sequence[int], start: int) -> np.ndarray:
        """Logits [n, vocab] after each of `ids`, which follow the `start` tokens that the cache already holds."""
        size = min(self._max_rows, self._max_tokens)
        pieces = (Piece(ids[at : at + size], start + at, 0) for at in range(0, len(ids), size))
        return np.concatenate([self._step([piece], every_row=True) for piece in pieces])

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """`count` greedy tokens after each prompt, stop tokens or not; as many run together as the cache holds."""
        longest = max((len(p) for p in prompts), default=0) + count
        pages = -(-longest // self._executor.block_size)
        size = max(1, min(self._max_rows, self._max_tokens, self._executor.num_blocks // pages))
        groups = (prompts[at : at + size] for at in range(0, len(prompts), size))
        return [tokens for group in groups for tokens in self._greedy(group, count, pages)]

    def _greedy(self, prompts: Sequence[Sequence[int]], count: int, pages: int) -> list[list[int]]:
        made = [[self._prefill(prompt, i * pages)] for i, prompt in enumerate(prompts)]
        for n in range(1, count):
            last = [Piece(made[i][-1:], len(p) + n - 1, i * pages) for i, p in enumerate(prompts)]
            for tokens, row in zip(made, self._step(last), strict=True):
                tokens.append(int(row.argmax()))
        return made

    def _prefill(self, prompt: Sequence[int], page: int) -> int:
        for at in range(0, len(prompt), self._max_tokens):
            row = self._step([Piece(prompt[at : at + self._max_tokens], at, page)])[-1]
        return int(row.argmax())

    def _step(self, pieces: Sequence[Piece], every_row: bool = False) -> np.ndarray:
        """Logits of every token, or of each piece's last."""
        rows = self._executor.step(packed(pieces, self._executor.block_size, every_row)).copy()
        if not np.isfinite(rows).all():
            raise PlancError("the plan's logits are not finite; look for NaN or infinity in the checkpoint's weights.")
        return rows


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
        (tokens,) = scorer.greedy([golden.prompt_ids], len(golden.tokens))
        yield _verdict(golden, tuple(tokens))


def _verdict(golden: Golden, tokens: tuple[int, ...]) -> Verdict:
    pairs = enumerate(zip(tokens, golden.tokens, strict=True))
    at = next((i for i, (new, old) in pairs if new != old), None)
    tied = at is not None and at < len(golden.margins) and golden.margins[at] < TIE
    return Verdict(golden, tokens, at, tied)
