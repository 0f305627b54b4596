"""From the engine's thread to asyncio: one HTTP request's sequences go in, their outputs come out as they appear."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from typing import Any

from planc.runtime.engine import Engine
from planc.runtime.errors import RequestError
from planc.runtime.output import Output, merge
from planc.runtime.protocol import Usage
from planc.runtime.sequence import SamplingParams

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Doorbell:
    """Wakes a loop from the engine's thread, once for all the jobs that a step gave something: each wake-up is a write
    to a pipe and a round of the loop, which at 32 streams would cost more than their events.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._due: deque[asyncio.Event] = deque()
        self._rung = False
        self._answered = threading.Event()
        self._answered.set()

    def ring(self, wake: asyncio.Event) -> None:
        """Have the loop set `wake`."""
        self._due.append(wake)
        if not self._rung:
            self._rung = True
            self._answered.clear()
            self.loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._rung = False  # first: what is rung from here on is either found below or rings anew
        while self._due:
            self._due.popleft().set()
        self.loop.call_soon(self._answered.set)  # behind the tasks that have just been woken

    def wait(self, seconds: float) -> None:
        """Until the tasks that were rung for have run, `seconds` at most. Not for the loop's own thread."""
        self._answered.wait(seconds)


class Job:
    """The sequences of one request: prompt i's sample j is choice i * samples + j.

    Raises RequestError when any prompt cannot be served; nothing is queued then. The choices that still run when the
    job is left, for whatever reason, must be ended with `abort`.
    """

    def __init__(
        self,
        engine: Engine,
        bell: Doorbell,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        samples: int,
        salt: str = "",
    ) -> None:
        for prompt in prompts:
            engine.resolve(prompt, params)
        self._engine = engine
        self._bell = bell
        self._arrived: deque[tuple[int, Output]] = deque()
        self._wake = asyncio.Event()
        self._signalled = False
        self._samples = samples
        self._latest: list[Output | None] = [None] * (len(prompts) * samples)
        self._running: dict[int, int] = {}  # choice -> sequence id
        try:
            for choice in range(len(prompts) * samples):
                sink = partial(self._put, choice)
                which, sample = divmod(choice, samples)
                self._running[choice] = engine.submit(prompts[which], params, sink, sample=sample, salt=salt)
        except RequestError:
            self.abort()
            raise

    async def outputs(self) -> AsyncIterator[list[tuple[int, Output]]]:
        """All (choice, output) that came since the last time, until every choice has finished."""
        while self._running:
            await self._wake.wait()
            self._wake.clear()
            self._signalled = False
            batch = [self._arrived.popleft() for _ in range(len(self._arrived))]
            for choice, output in batch:
                self._latest[choice] = output
                if output.finish_reason is not None:
                    del self._running[choice]
            yield batch

    async def collect(self, receive: Receive) -> list[Output]:
        """Every choice's whole output. A client that leaves ends the job; its choices then finish with abort."""
        pieces: list[list[Output]] = [[] for _ in self._latest]
        watcher = asyncio.ensure_future(self.watch(receive))
        try:
            async for batch in self.outputs():
                for choice, output in batch:
                    pieces[choice].append(output)
        finally:
            watcher.cancel()
            self.abort()
        return [merge(outputs) for outputs in pieces]

    async def watch(self, receive: Receive) -> None:
        """Abort when the client disconnects."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.abort()

    def abort(self) -> None:
        """End the choices that still run, before the engine's next step. Harmless when none does."""
        for seq in self._running.values():
            self._engine.abort(seq)

    def usage(self) -> Usage:
        """Token counts so far."""
        seen = [output for output in self._latest if output is not None]
        firsts = [output for output in self._latest[:: self._samples] if output is not None]
        return Usage(
            sum(output.prompt_tokens for output in firsts),
            sum(output.completion_tokens for output in seen),
            sum(output.cached_tokens for output in firsts),
        )

    def _put(self, choice: int, output: Output) -> None:
        """Called by the engine's thread. One wake-up serves all that arrives before the job gets to it."""
        self._arrived.append((choice, output))
        if not self._signalled:
            self._signalled = True
            self._bell.ring(self._wake)


class EventStream:
    """An ASGI response of server-sent events, which aborts its job when the client leaves or anything fails."""

    def __init__(self, job: Job, events: AsyncIterator[bytes]) -> None:
        self._job = job
        self._events = events

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Send the events."""
        watcher = asyncio.ensure_future(self._job.watch(receive))
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": False})
        finally:
            watcher.cancel()
            self._job.abort()


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {_encode(data)}\n\n".encode()


class Frame:
    """Events that differ in their choices only: what all have in common is written once."""

    def __init__(self, head: dict[str, Any], tail: dict[str, Any]) -> None:
        self._before = _encode({**head, "choices": []})[:-2]
        self._after = "]," + _encode(tail)[1:] if tail else "]}"

    def event(self, *choices: dict[str, Any]) -> bytes:
        """One server-sent event."""
        return f"data: {self._before}{','.join(map(_encode, choices))}{self._after}\n\n".encode()
