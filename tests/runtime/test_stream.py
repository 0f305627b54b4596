"""Between the engine's thread and the loop: one wake-up for many jobs, and a thread that waits until they have run."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import httpx
import pytest

from planc.runtime.stream import Doorbell, Frame, event
from tests.runtime.fake import FakeExecutor
from tests.runtime.live import VOCAB, events, make_service, serving


def test_one_ring_wakes_every_task_and_wait_sees_that_they_have_run() -> None:
    ran: list[int] = []
    seen: list[int] = []

    async def go() -> int:
        bell = Doorbell()
        wakes = [asyncio.Event() for _ in range(20)]
        calls = 0
        plain = bell.loop.call_soon_threadsafe

        def counted(*args):
            nonlocal calls
            calls += 1
            return plain(*args)

        bell.loop.call_soon_threadsafe = counted

        async def task(i: int) -> None:
            for _ in range(3):
                await wakes[i].wait()
                wakes[i].clear()
                ran.append(i)

        def rings() -> None:
            for _ in range(3):
                busy = threading.Event()
                plain(lambda: (busy.set(), time.sleep(0.3)))  # noqa: B023 - it is waited for
                busy.wait(5.0)
                for wake in wakes:
                    bell.ring(wake)
                bell.wait(5.0)
                seen.append(len(ran))

        thread = threading.Thread(target=rings)
        thread.start()
        await asyncio.gather(*map(task, range(20)))
        thread.join()
        return calls

    calls = asyncio.run(go())
    assert seen == [20, 40, 60]
    assert 3 <= calls < 30  # the loop may answer while the others are still being rung for


def test_a_wait_ends_although_the_loop_is_busy() -> None:
    async def go() -> float:
        bell = Doorbell()
        took: list[float] = []

        def waits() -> None:
            bell.ring(asyncio.Event())
            start = time.monotonic()
            bell.wait(0.02)
            took.append(time.monotonic() - start)

        thread = threading.Thread(target=waits)
        thread.start()
        time.sleep(0.3)  # the loop
        thread.join()
        return took[0]

    assert 0.02 <= asyncio.run(go()) < 0.25


@pytest.mark.parametrize("tail", [{}, {"usage": None}, {"usage": {"prompt_tokens": 1}}])
@pytest.mark.parametrize("choices", [[], [{"index": 0, "text": 'é"\n'}], [{"index": 0}, {"index": 1}]])
def test_a_frame_writes_what_an_event_of_all_fields_is(tail: dict, choices: list[dict]) -> None:
    head = {"id": "x", "model": "a,b]}"}
    assert Frame(head, tail).event(*choices) == event({**head, "choices": choices, **tail})


@pytest.mark.parametrize("yield_seconds", [0.0, 0.005])
def test_streams_are_whole_whether_steps_wait_for_them_or_not(yield_seconds: float) -> None:
    service = make_service(FakeExecutor(200, 16, VOCAB, step_seconds=0.001), yield_seconds=yield_seconds)
    body = {"prompt": [5, 6, 7], "max_tokens": 30, "ignore_eos": True, "temperature": 0}
    with serving(service) as url, httpx.Client(base_url=url, timeout=30) as client:
        whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]

        async def ask() -> list[str]:
            async with httpx.AsyncClient(base_url=url, timeout=30) as many:
                posts = [many.post("/v1/completions", content=json.dumps({**body, "stream": True})) for _ in range(12)]
                found = [events(r) for r in await asyncio.gather(*posts)]
            return ["".join(e["choices"][0]["text"] for e in own) for own in found]

        assert asyncio.run(ask()) == [whole] * 12
