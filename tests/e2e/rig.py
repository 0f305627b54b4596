"""Runs plans for tests: in go prompts and limits, out come the tokens and the very logits that chose them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from planc.plans import store
from planc.runtime.engine import Engine
from planc.runtime.executors import open_executor
from planc.runtime.scheduler import SchedulerLimits
from planc.runtime.sequence import SamplingParams, Sequence
from planc.runtime.tokenizer import Tokenizer


class Recorder(Engine):
    """An engine that keeps each row of logits by sequence and position."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._sampler = None  # every row's logits are wanted
        self.rows: dict[int, dict[int, np.ndarray]] = {}

    def _accept(self, seq: Sequence, logits: np.ndarray, now: float) -> None:
        self.rows.setdefault(seq.id, {})[len(seq.tokens)] = logits.copy()
        super()._accept(seq, logits, now)


@dataclass(frozen=True)
class Result:
    """Per prompt: tokens, and logits [tokens, vocab]; then what the scheduler did."""

    tokens: list[list[int]]
    logits: list[np.ndarray]
    preemptions: int
    prefix_hits: int
    used_blocks: int


def run(
    plan: Path,
    prompts: list[list[int]],
    *,
    max_tokens: int = 12,
    seqs: int = 16,
    tokens: int = 64,
    blocks: int = 256,
    threads: int = 2,
    prefix_caching: bool = False,
    rounds: int = 1,
) -> Result:
    """Greedy generation of all prompts together, `rounds` times over on one engine; the result is the last round's."""
    loaded = store.load(plan)
    executor = open_executor(plan, loaded, blocks, threads)
    limits = SchedulerLimits(loaded.limits.max_model_len, seqs, tokens)
    engine = Recorder(executor, Tokenizer.load(plan / "tokenizer"), limits, prefix_caching=prefix_caching, seed=0)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    try:
        for _ in range(rounds):
            outputs = engine.generate(prompts, params)
        ids = sorted(engine.rows)[-len(prompts) :]
        logits = [np.stack([row for _, row in sorted(engine.rows[i].items())]) for i in ids]
        return Result(
            [list(o.token_ids) for o in outputs],
            logits,
            engine.scheduler.preemptions,
            engine.scheduler.prefix_hits,
            engine.pool.num_used,
        )
    finally:
        engine.close()
