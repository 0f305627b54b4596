"""A plan's own logits: in goes a built plan and a prompt, out come what its engine generates and the rows behind it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planc.plans import store
from planc.runtime.choice import Choice, Outcome
from planc.runtime.cpu import CpuExecutor
from planc.runtime.engine import Engine
from planc.runtime.goldens import Scorer
from planc.runtime.scheduler import SchedulerLimits
from planc.runtime.sequence import SamplingParams, Sequence
from planc.runtime.tokenizer import Tokenizer

Rows = NDArray[np.float32]


class Recorder(Engine):
    """An engine that keeps each row of logits by sequence and position."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sampler = None  # every row's logits are wanted
        self.rows: dict[int, dict[int, Rows]] = {}

    def _accept(self, seq: Sequence, outcome: Outcome, now: float) -> None:
        assert not isinstance(outcome, Choice), "no sampler"
        self.rows.setdefault(seq.id, {})[len(seq.tokens)] = outcome.copy()
        super()._accept(seq, outcome, now)


@dataclass(frozen=True)
class Generated:
    """Greedy tokens, and the logits [tokens, vocab] that chose them."""

    tokens: list[int]
    logits: Rows


def generate(plan: Path, prompt: list[int], *, chunk: int, count: int) -> Generated:
    """`count` greedy tokens after the prompt, which the engine prefills `chunk` tokens at a time."""
    loaded = store.load(plan)
    length = len(prompt) + count
    executor = CpuExecutor(plan, loaded, -(-length // loaded.kv.block_size), num_threads=1)
    limits = SchedulerLimits(loaded.limits.max_model_len, 1, chunk)
    engine = Recorder(executor, Tokenizer.load(plan / "tokenizer"), limits, prefix_caching=False, seed=0)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        (output,) = engine.generate([prompt], params)
        (rows,) = engine.rows.values()
        return Generated(list(output.token_ids), np.stack([row for _, row in sorted(rows.items())]))
    finally:
        engine.close()


def every_row(plan: Path, prompt: list[int], *, chunk: int) -> Rows:
    """Logits [T, vocab] after each token of the prompt, `chunk` tokens a step."""
    loaded = store.load(plan)
    executor = CpuExecutor(plan, loaded, -(-len(prompt) // loaded.kv.block_size), num_threads=1)
    try:
        return Scorer(executor, chunk, chunk).logits(prompt, 0)
    finally:
        executor.close()
