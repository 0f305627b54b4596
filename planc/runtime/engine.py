"""The engine: requests go in from any thread, each one's Outputs come out through its sink, step by step."""

from __future__ import annotations

import itertools
import logging
import queue
import random
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planc.runtime.batch import BatchBuilder, Executor
from planc.runtime.choice import Choice, Outcome, Recorder, SamplingExecutor, chosen, token_of
from planc.runtime.errors import RequestError
from planc.runtime.kv import BlockPool
from planc.runtime.output import Output, OutputWriter, Sink, merge
from planc.runtime.sampler import logprobs_of, sample
from planc.runtime.scheduler import Chunk, Scheduler, SchedulerLimits
from planc.runtime.sequence import SamplingParams, Sequence, Times
from planc.runtime.tokenizer import Tokenizer, check_ids

log = logging.getLogger("planc.engine")
MAX_FAILED_STEPS = 3  # after so many steps in a row in which every sequence failed, the engine calls itself unhealthy

Row = tuple[Sequence, Outcome]


class Observer:
    """Told what the engine does, from the engine's thread; this one ignores it. `now` is monotonic seconds."""

    def stepped(self, chunks: Items[Chunk], now: float) -> None:
        """A step has run."""

    def sampled(self, seq: Sequence, now: float) -> None:
        """A token was added; seq.times.last_token still holds the time of the one before."""

    def finished(self, seq: Sequence, output: Output, now: float) -> None:
        """A sequence has ended."""


@dataclass(slots=True)
class _Stream:
    seq: Sequence
    writer: OutputWriter
    sink: Sink


class Engine:
    """Serves sequences on one executor.

    Either `start()` it, and it steps in a thread of its own that sleeps while there is nothing to do, or call
    `generate` without starting it. Sinks are called from the stepping thread and must not block.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        limits: SchedulerLimits,
        *,
        eos_token_ids: Items[int] = (),
        prefix_caching: bool = True,
        seed: int | None = None,
        observer: Observer | None = None,
    ) -> None:
        capacity = executor.num_blocks * executor.block_size
        limits = replace(limits, max_model_len=min(limits.max_model_len, capacity))
        self.executor = executor
        self.tokenizer = tokenizer
        self.limits = limits
        self.eos_token_ids = tuple(i for i in eos_token_ids if 0 <= i < executor.vocab_size)
        self.pool = BlockPool(executor.num_blocks, executor.block_size)
        self.scheduler = Scheduler(limits, self.pool, prefix_caching=prefix_caching)
        self.observer = observer or Observer()
        self.between_steps: Callable[[], None] = lambda: None  # called by the stepping thread
        max_blocks = self.pool.blocks_for(limits.max_model_len)
        self._builder = BatchBuilder(
            limits.max_num_seqs, limits.max_num_batched_tokens, max_blocks, executor.block_size
        )
        self._sampler = executor if isinstance(executor, SamplingExecutor) and executor.samples else None
        self._recorder = Recorder(limits.max_num_seqs, self.eos_token_ids)
        self._streams: dict[int, _Stream] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed: str | None = None
        self._thread: threading.Thread | None = None
        self._ids = itertools.count()
        self._random = random.Random(seed)
        self._failed_steps = 0
        self._progress = time.monotonic()

    # ---- from any thread

    def resolve(self, prompt: Items[int], params: SamplingParams) -> SamplingParams:
        """The parameters with max_tokens filled in; RequestError when the request can never be served."""
        if not prompt:
            raise RequestError("the prompt is empty; send at least one token", param="prompt")
        least = max(params.min_tokens, 1) if params.max_tokens is None else params.max_tokens
        self.scheduler.check(len(prompt), least)
        check_ids(prompt, self.executor.vocab_size)
        params.check_vocab(self.executor.vocab_size)
        self._check_choice(params)
        if params.max_tokens is None:
            params = replace(params, max_tokens=self.limits.max_model_len - len(prompt))
        return params

    def _check_choice(self, params: SamplingParams) -> None:
        """RequestError when min_tokens masks every token that allowed_token_ids leaves."""
        ends = {*self.eos_token_ids, *params.stop_token_ids}
        if params.min_tokens and params.allowed_token_ids and ends.issuperset(params.allowed_token_ids):
            raise RequestError(
                "allowed_token_ids holds only tokens that end the sequence, which min_tokens forbids; allow another",
                param="allowed_token_ids",
            )

    def submit(self, prompt: Items[int], params: SamplingParams, sink: Sink, *, sample: int = 0, salt: str = "") -> int:
        """Queue a sequence and return its id. Raises RequestError before anything is queued.

        sample tells apart the sequences of one request that share a seed; prompts share cached prefixes only within
        the same salt. A sequence whose params have no seed gets one drawn.
        """
        params = self.resolve(prompt, params)
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        times = Times(arrival=time.monotonic())
        with self._lock:  # ids and queue places are given together, so that ids count up with arrival
            if self._closed is not None:
                raise RequestError(self._closed, status=503, code="engine_stopped")
            seq = Sequence(next(self._ids), list(prompt), len(prompt), params, seed, sample, salt.encode(), times=times)
            stream = _Stream(seq, OutputWriter(seq, self.tokenizer, self.eos_token_ids), sink)
            self._inbox.put(lambda: self._add(stream))
        return seq.id

    def abort(self, seq_id: int) -> None:
        """End a sequence before the next step; its sink gets a last Output with finish_reason abort.."""
        self._inbox.put(lambda: self._abort(seq_id))

    def start(self) -> None:
        """Begin to step in a thread."""
        self._thread = threading.Thread(target=self._run, name="planc-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after the current step, abort what is left, close the executor."""
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join()
        self._stop("the engine has been stopped; start the server again", "abort")
        self.executor.close()

    def healthy(self, patience: float = 300.0) -> bool:
        """False when the engine has died, keeps failing, or has had work for `patience` seconds without a step."""
        hung = self.scheduler.has_work and time.monotonic() - self._progress > patience
        return self._closed is None and self._failed_steps < MAX_FAILED_STEPS and not hung

    # ---- the stepping thread

    def generate(self, prompts: Items[Items[int]], params: SamplingParams | Items[SamplingParams]) -> list[Output]:
        """Run prompts to their end and return their whole outputs in order. For an engine that was not started."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        pieces: list[list[Output]] = [[] for _ in prompts]
        for prompt, own, outputs in zip(prompts, each, pieces, strict=True):
            self.submit(prompt, own, outputs.append)
        self._take_commands(wait=False)
        while self.scheduler.has_work:
            self.step()
            self._take_commands(wait=False)
        self.scheduler.check_idle()
        return [merge(outputs) for outputs in pieces]

    def step(self) -> None:
        """Schedule, run, sample, emit. A failure ends the sequences that caused it and no other."""
        chunks = self.scheduler.schedule()
        now = time.monotonic()
        for chunk in chunks:
            if chunk.seq.times.scheduled is None:
                chunk.seq.times.scheduled = now
        rows = self._execute(chunks)
        self._progress = now = time.monotonic()
        for seq, outcome in rows:
            self._accept(seq, outcome, now)
        self.observer.stepped(chunks, now)
        self.between_steps()

    def _run(self) -> None:
        try:
            while self._take_commands(wait=not self.scheduler.has_work):
                if self.scheduler.has_work:
                    self.step()
                if not self.scheduler.has_work:
                    self.scheduler.check_idle()
        except Exception as e:
            log.exception("the engine has died")
            self._stop(f"the engine has died: {e}; start the server again", "error")

    def _take_commands(self, *, wait: bool) -> bool:
        """Do what other threads asked for; False when it is time to stop."""
        while True:
            try:
                command = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._progress = time.monotonic()
            command()
            wait = False

    def _execute(self, chunks: list[Chunk]) -> list[Row]:
        try:
            outcomes = self._outcomes(chunks)
        except Exception:
            log.exception("a step of %d sequences failed; each is tried by itself", len(chunks))
            return self._execute_alone(chunks)
        self._failed_steps = 0
        for chunk in chunks:
            self.scheduler.advance(chunk)
        return list(zip([chunk.seq for chunk in chunks for _ in range(chunk.rows)], outcomes, strict=True))

    def _outcomes(self, chunks: list[Chunk]) -> list[Outcome]:
        """Runs a step; of each row the token that the device chose, or its logits."""
        batch = self._builder.fill(chunks)
        if self._sampler is None:
            return list(self.executor.step(batch))
        records = self._recorder.fill(chunks)
        return chosen(records, *self._sampler.sample_step(batch, records))

    def _execute_alone(self, chunks: list[Chunk]) -> list[Row]:
        """Run each chunk by itself; a sequence that fails is lost, one that counted on its pages is recomputed."""
        rows: list[Row] = []
        doubtful: set[int] = set()
        for chunk in chunks:
            unwritten = chunk.seq.pages[chunk.start // self.pool.block_size :]
            if doubtful.intersection(chunk.seq.pages):
                doubtful.update(unwritten)  # its own new pages were made findable when it was scheduled
                self.scheduler.preempt(chunk.seq)
                continue
            try:
                outcomes = [x if isinstance(x, Choice) else x.copy() for x in self._outcomes([chunk])]
            except Exception as e:  # noqa: BLE001 - whatever a device raises belongs to this sequence
                doubtful.update(unwritten)
                self._fail(chunk.seq, f"the model step failed: {e}")
            else:
                self.scheduler.advance(chunk)
                rows.extend((chunk.seq, outcome) for outcome in outcomes)
        self.pool.forget(doubtful)
        self._failed_steps = 0 if rows else self._failed_steps + 1
        return rows

    def _accept(self, seq: Sequence, outcome: Outcome, now: float) -> None:
        """Take the next token of a sequence and pass on what it makes visible; or score a token of its prompt."""
        if seq.id not in self._streams:
            return  # an earlier row of this step has ended it
        stream, count = self._streams[seq.id], seq.params.logprobs
        if seq.wanted < seq.prompt_len - 1:
            assert not isinstance(outcome, Choice), "log probabilities are asked for"
            self._score(stream, outcome)
            return
        if seq.params.max_tokens == 0:
            self._emit(stream, stream.writer.finish("length"))
            return
        try:
            if isinstance(outcome, Choice):
                token, logprobs = token_of(outcome, seq), None
            else:
                token = sample(outcome, seq, self.eos_token_ids)
                logprobs = logprobs_of(outcome, token, count) if count is not None else None
            seq.tokens.append(token)
            output = stream.writer.push(token, logprobs)
        except Exception as e:
            log.exception("sequence %d failed", seq.id)
            self._fail(seq, f"sampling failed: {e}")
            return
        self.observer.sampled(seq, now)
        seq.times.last_token = now
        seq.times.first_token = seq.times.first_token or now
        if output is not None:
            self._emit(stream, output)

    def _score(self, stream: _Stream, logits: NDArray[np.float32]) -> None:
        """Take the log probabilities of the prompt token that follows the wanted one."""
        seq = stream.seq
        try:
            token = seq.tokens[seq.wanted + 1]
            stream.writer.scored(logprobs_of(logits, token, seq.params.prompt_logprobs or 0))
            seq.scored += 1
        except Exception as e:
            log.exception("sequence %d failed", seq.id)
            self._fail(seq, f"scoring the prompt failed: {e}")

    def _emit(self, stream: _Stream, output: Output) -> None:
        if output.finish_reason is not None:
            self.scheduler.finish(stream.seq)
            del self._streams[stream.seq.id]
            self.observer.finished(stream.seq, output, time.monotonic())
        try:
            stream.sink(output)
        except Exception:
            log.exception("the receiver of sequence %d is gone", stream.seq.id)
            self._abort(stream.seq.id)

    def _add(self, stream: _Stream) -> None:
        self._streams[stream.seq.id] = stream
        self.scheduler.add(stream.seq)

    def _abort(self, seq_id: int) -> None:
        stream = self._streams.get(seq_id)
        if stream is not None:
            self._emit(stream, stream.writer.finish("abort"))

    def _fail(self, seq: Sequence, error: str) -> None:
        stream = self._streams[seq.id]
        self._emit(stream, stream.writer.finish("error", error))

    def _stop(self, why: str, reason: str) -> None:
        """Take no more requests; end those that are queued or running."""
        with self._lock:
            self._closed = self._closed or why
        while self._take_commands(wait=False) is False:
            pass
        for stream in list(self._streams.values()):
            try:
                self._emit(stream, stream.writer.finish(reason, why if reason == "error" else None))
            except Exception:  # what killed the engine may have left its books wrong; the others must still hear of it
                log.exception("sequence %d could not be closed", stream.seq.id)
