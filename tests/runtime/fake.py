"""A model that needs no weights: packed steps go in, logits that depend on each token's whole history come out.

The history is read back through page table and slots from a store of (token, position) pairs, exactly as the real
kernels read keys and values: all of a step's tokens are stored first, then every wanted row reads its own. A wrong
page, slot, position, or a page reused too early therefore changes tokens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from planc.runtime.batch import Batch
from planc.runtime.tokenizer import Tokenizer

Logits = Callable[[NDArray[np.int64]], NDArray[np.float32]]
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "naïve café, 今天天气如何？ ďábelské 客单价 😀👩‍👩‍👧",
    "0123456789 {}[]()<>",
]


def hashed_logits(vocab_size: int, scale: float = 8.0) -> Logits:
    """Logits that are a hash of the history: any other history gives other logits."""
    lanes = np.arange(vocab_size, dtype=np.uint64)

    def logits(history: NDArray[np.int64]) -> NDArray[np.float32]:
        powers = np.cumprod(np.full(len(history), 6364136223846793005, np.uint64))
        with np.errstate(over="ignore"):
            key = ((history.astype(np.uint64) + np.uint64(11)) * powers).sum(dtype=np.uint64)
            mixed = (key + lanes * np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
        return ((mixed >> np.uint64(40)).astype(np.float32) / 2**24 * scale).astype(np.float32)

    return logits


def echo_logits(vocab_size: int, period: int) -> Logits:
    """The model repeats its first `period` tokens for ever."""

    def logits(history: NDArray[np.int64]) -> NDArray[np.float32]:
        out = np.zeros(vocab_size, np.float32)
        out[history[len(history) % period]] = 20
        return out

    return logits


class FakeExecutor:
    """An Executor over a paged store of token ids. `before` sees each batch first and may raise or wait."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 512,
        logits: Logits | None = None,
        before: Callable[[Batch], None] | None = None,
        step_seconds: float = 0.0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.steps = 0
        self.tokens_run = 0
        self.closed = False
        self._logits = logits or hashed_logits(vocab_size)
        self._before = before
        self._step_seconds = step_seconds
        self._tokens = np.full(num_blocks * block_size, -1, np.int64)
        self._positions = np.full(num_blocks * block_size, -1, np.int64)
        self._lock = threading.Lock()

    def step(self, batch: Batch) -> NDArray[np.float32]:
        assert self._lock.acquire(blocking=False), "two steps at once"
        try:
            return self._step(batch)
        finally:
            self._lock.release()

    def close(self) -> None:
        self.closed = True

    def _step(self, batch: Batch) -> NDArray[np.float32]:
        if self._before:
            self._before(batch)
        if self._step_seconds:
            time.sleep(self._step_seconds)
        self._check(batch)
        self.steps += 1
        self.tokens_run += len(batch.ids)
        self._tokens[batch.slots] = batch.ids
        self._positions[batch.slots] = batch.positions
        owner = np.repeat(np.arange(len(batch.page_table)), np.diff(batch.query_start))
        rows = [self._logits(self._history(batch, int(owner[row]), int(row))) for row in batch.logit_rows]
        return np.array(rows, np.float32).reshape(len(rows), self.vocab_size)

    def _history(self, batch: Batch, s: int, row: int) -> NDArray[np.int64]:
        positions = np.arange(batch.positions[row] + 1)
        slots = batch.page_table[s][positions // self.block_size].astype(np.int64) * self.block_size
        slots += positions % self.block_size
        found = self._tokens[slots].copy()
        found[self._positions[slots] != positions] = -7  # a page that holds another sequence's tokens
        return found

    def _check(self, batch: Batch) -> None:
        """What the C API takes for granted."""
        for array in (batch.ids, batch.positions, batch.slots, batch.page_table, batch.query_start, batch.logit_rows):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
        start = batch.query_start
        assert start[0] == 0
        assert start[-1] == len(batch.ids) == len(batch.positions) == len(batch.slots)
        assert (np.diff(start) > 0).all()
        assert len(set(batch.slots.tolist())) == len(batch.slots), "two tokens in one slot"
        assert ((batch.ids >= 0) & (batch.ids < self.vocab_size)).all()
        rows = batch.logit_rows.tolist()
        assert rows == sorted(set(rows))
        assert set(rows) <= set(range(len(batch.ids)))
        for s in range(len(batch.page_table)):
            own = slice(int(start[s]), int(start[s + 1]))
            positions = batch.positions[own]
            assert (np.diff(positions) == 1).all()
            pages = batch.page_table[s][positions // self.block_size]
            assert (batch.slots[own] == pages * self.block_size + positions % self.block_size).all()
            assert ((pages >= 0) & (pages < self.num_blocks)).all()


def reference(prompt: Sequence[int], count: int, logits: Logits) -> list[int]:
    """Greedy tokens of a model that sees the history directly."""
    history = list(prompt)
    for _ in range(count):
        history.append(int(logits(np.array(history, np.int64)).argmax()))
    return history[len(prompt) :]


def tiny_tokenizer(vocab_size: int = 400, **settings: object) -> Tokenizer:
    """A byte-level BPE tokenizer with <s>, </s>, <|im_start|>, <|im_end|> as ids 0 to 3."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS * 4, trainer)
    config = {"bos_token": "<s>", "eos_token": "</s>", **settings}
    return Tokenizer(raw, config, {"eos_token_id": [1, 3]}, TEMPLATE)


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
