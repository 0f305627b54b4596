"""In-flight batching: queued and running sequences go in, the token chunks of the next step come out. No tensors."""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from dataclasses import dataclass

from planc.runtime.errors import RequestError
from planc.runtime.kv import BlockPool, block_digest, root_digest
from planc.runtime.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Tokens of one sequence (prompt and output), sequences in one step, tokens in one step."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + count) of `seq`, to be run in the next step. The last `rows` of them want logits: one when
    it reaches the last known token, or none; all from `seq.wanted` on when the prompt is scored.
    """

    seq: Sequence
    start: int
    count: int
    rows: int

    @property
    def end(self) -> int:
        """One past the last token of the chunk."""
        return self.start + self.count


class Scheduler:
    """First come, first served. A step takes decodes first, then prefill chunks, then new sequences.

    A sequence is admitted only when all its known tokens get pages, so only decodes ever ask for more. When none is
    left, the newest running sequence is preempted: it gives its pages back and is recomputed later, from the front
    of the queue. Pages are made findable when scheduled, not when run: within a step every layer writes all new keys
    and values before it reads any, so sequences of one step may share them.

    A step gives max_num_seqs rows of logits. Decodes take one each; prompts that are scored share what is left.
    """

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, *, prefix_caching: bool = True) -> None:
        self.limits = limits
        self.pool = pool
        self.prefix_caching = prefix_caching
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.preemptions = 0
        self.prefix_queries = 0  # tokens looked up in the prefix cache
        self.prefix_hits = 0  # tokens found there

    @property
    def has_work(self) -> bool:
        """True while a sequence is queued or running."""
        return bool(self.waiting or self.running)

    def check(self, prompt_len: int, max_tokens: int) -> None:
        """Raise RequestError when such a sequence could never run to its end."""
        limit = self.limits.max_model_len
        if prompt_len + max_tokens > limit:
            raise RequestError(
                f"the maximum context length is {limit} tokens, but the request needs {prompt_len + max_tokens}: "
                f"{prompt_len} in the prompt and {max_tokens} to generate; shorten the prompt or lower max_tokens",
                code="context_length_exceeded",
            )
        need = self.pool.blocks_for(prompt_len + max(max_tokens - 1, 0))  # the last token is never run
        if need > self.pool.num_blocks:
            raise RequestError(
                f"the request needs {need} KV cache blocks of {self.pool.block_size} tokens for {prompt_len} prompt "
                f"tokens and {max_tokens} to generate, but the cache has {self.pool.num_blocks}; lower max_tokens, or "
                "raise --kv-cache-memory-bytes",
                code="context_length_exceeded",
            )

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence, whose lengths have passed `check`. Ids count up with arrival."""
        self.waiting.append(seq)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step; empty only when nothing is queued or running."""
        chunks: list[Chunk] = []
        budget, rows = self.limits.max_num_batched_tokens, self.limits.max_num_seqs
        for decode in (True, False):
            for seq in tuple(self.running):
                if seq.status is not Status.RUNNING or (seq.pending == 1) is not decode:
                    continue
                count = _room(seq, budget, rows)
                if count and self._extend(seq):
                    chunks.append(chunk := self._chunk(seq, count))
                    budget, rows = budget - count, rows - chunk.rows
        while budget > 0 and rows > 0 and (newcomer := self._admit()):
            chunks.append(chunk := self._chunk(newcomer, _room(newcomer, budget, rows)))
            budget, rows = budget - chunk.count, rows - chunk.rows
        return chunks

    def advance(self, chunk: Chunk) -> None:
        """Note that a chunk has run."""
        chunk.seq.computed = chunk.end

    def finish(self, seq: Sequence) -> None:
        """Take a sequence out, whatever its status, and give its pages back. Doing it twice is harmless."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self._release(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED

    def preempt(self, seq: Sequence) -> None:
        """Send a running sequence back to its place in the queue, ahead of all that came later, to be recomputed."""
        self.running.remove(seq)
        self._release(seq)
        seq.status = Status.WAITING
        seq.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, seq, key=_age)

    def check_idle(self) -> None:
        """Raise RuntimeError when pages are held although no sequence is running. Constant time."""
        self.pool.check_counts()
        if not self.running and self.pool.num_used:
            raise RuntimeError(f"scheduler: no sequence is running, yet {self.pool.num_used} pages are held")

    def check_integrity(self) -> None:
        """Raise RuntimeError when pages and sequences disagree. Looks at every page: for tests."""
        self.pool.check_integrity()
        held = {page for seq in self.running for page in seq.pages}
        if len(held) != self.pool.num_used or any(seq.pages for seq in self.waiting):
            raise RuntimeError(
                f"scheduler: running sequences hold {len(held)} pages, the pool counts {self.pool.num_used}"
            )

    def _extend(self, seq: Sequence) -> bool:
        """Give a running sequence the pages of its known tokens; False when it had to be preempted itself."""
        missing = self.pool.blocks_for(len(seq.tokens)) - len(seq.pages)
        while missing > self.pool.num_available:
            newest = self.running[-1]
            self.preempt(newest)
            if newest is seq:
                return False
        if missing:
            seq.pages.extend(self.pool.allocate(missing))
        return True

    def _admit(self) -> Sequence | None:
        """Move the head of the queue to the running ones if its pages, prefix hits counted, are there."""
        if not self.waiting or len(self.running) >= self.limits.max_num_seqs:
            return None
        seq = self.waiting[0]
        hits = self._match(seq)
        missing = self.pool.blocks_for(len(seq.tokens)) - len(hits)
        # Headroom of a page a running sequence: a newcomer that took the last pages would soon be preempted again, and
        # a sequence preempted in this step would come straight back.
        if missing + len(self.running) > self.pool.num_available - self.pool.num_idle(hits):
            return None
        self.pool.acquire(hits)
        seq.pages = array("i", [*hits, *self.pool.allocate(missing)])
        seq.computed = len(hits) * self.pool.block_size
        self._count_hits(seq)
        seq.status = Status.RUNNING
        insort(self.running, self.waiting.popleft(), key=_age)
        return seq

    def _count_hits(self, seq: Sequence) -> None:
        if not self.prefix_caching or seq.cached is not None:
            seq.cached = seq.cached or 0
            return
        seq.cached = seq.computed
        self.prefix_queries += len(seq.tokens)
        self.prefix_hits += seq.computed

    def _match(self, seq: Sequence) -> list[int]:
        """Cached pages of the sequence's prefix. What is left over begins with a token whose logits are needed."""
        if not self.prefix_caching:
            return []
        full = seq.wanted // self.pool.block_size
        self._digest(seq, full)
        return self.pool.match(seq.digests[:full])

    def _chunk(self, seq: Sequence, count: int) -> Chunk:
        start, end = seq.computed, seq.computed + count
        if self.prefix_caching:
            first, full = start // self.pool.block_size, end // self.pool.block_size
            if first < full:
                self._digest(seq, full)
            for block in range(first, full):
                self.pool.register(seq.pages[block], seq.digests[block])
        return Chunk(seq, start, count, max(0, end - max(start, seq.wanted)))

    def _digest(self, seq: Sequence, blocks: int) -> None:
        """Fill seq.digests up to `blocks` full blocks."""
        size = self.pool.block_size
        while len(seq.digests) < blocks:
            at = len(seq.digests) * size
            parent = seq.digests[-1] if seq.digests else root_digest(seq.salt)
            seq.digests.append(block_digest(parent, seq.tokens[at : at + size]))

    def _release(self, seq: Sequence) -> None:
        self.pool.release(seq.pages)
        seq.pages = array("i")
        seq.computed = 0


def _room(seq: Sequence, budget: int, rows: int) -> int:
    """How many of its pending tokens a sequence may run with `budget` tokens and `rows` rows of logits left."""
    return max(0, min(seq.pending, budget, seq.wanted + rows - seq.computed))


def _age(seq: Sequence) -> int:
    """Ids count up with arrival."""
    return seq.id
