"""Many clients at once, few pages: everyone gets its own text; clients that vanish give their pages back."""

import asyncio
import json
import random

import httpx
import pytest

from tests.runtime.fake import FakeExecutor, echo_logits
from tests.runtime.live import TOKENIZER, VOCAB, events, make_service, serving, settle, text_of, wait_for

PERIOD = 8


def marker(number: int) -> list[int]:
    """Eight tokens that no other client sends."""
    rng = random.Random(number)
    return [5 + number, *(rng.randrange(80, 250) for _ in range(PERIOD - 1))]


def echoing(blocks, **settings):
    return FakeExecutor(blocks, 16, VOCAB, logits=echo_logits(VOCAB, PERIOD), **settings)


def test_64_streams_with_pages_for_a_few():
    """Each answer repeats its own marker, whole; sequences are preempted on the way."""
    service = make_service(echoing(18), seqs=32, tokens=64)

    async def client(session, number, path):
        body = {"prompt": marker(number) * 3, "max_tokens": 64, "temperature": 0, "ignore_eos": True, "stream": True}
        return events(await session.post(path, json=body))

    async def all_clients(url):
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as session:
            return await asyncio.gather(*(client(session, number, "/v1/completions") for number in range(64)))

    with serving(service) as url:
        for number, chunks in enumerate(asyncio.run(all_clients(url))):
            assert text_of(chunks) == TOKENIZER.decode(marker(number) * 8)
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        settle(service)
        assert service.engine.scheduler.preemptions > 0


def test_mixed_storm_every_choice_equals_its_quiet_run():
    """Streams, whole answers, several choices, stops and aborts at once: seeds make every answer repeatable."""
    service = make_service(FakeExecutor(40, 16, VOCAB), seqs=12)
    rng = random.Random(3)
    bodies = [
        {
            "prompt": [rng.randrange(5, VOCAB) for _ in range(rng.randrange(1, 60))],
            "max_tokens": rng.randrange(1, 60),
            "seed": number,
            "n": rng.choice([1, 1, 2]),
            "temperature": rng.choice([0, 0.7, 1.3]),
            "stream": rng.random() < 0.5,
            "ignore_eos": True,
        }
        for number in range(24)
    ]

    async def answer(session, body):
        response = await session.post("/v1/completions", json=body)
        if body["stream"]:
            chunks = events(response)
            return [text_of(chunks, choice) for choice in range(body["n"])]
        return [choice["text"] for choice in response.json()["choices"]]

    async def vanish(session, body):
        async with session.stream(
            "POST", "/v1/completions", json={**body, "stream": True, "max_tokens": 60}
        ) as response:
            async for _ in response.aiter_bytes():
                return None

    async def storm(url):
        async with httpx.AsyncClient(base_url=url, timeout=60) as session:
            work = [answer(session, body) for body in bodies]
            for body in bodies[::4]:
                work.insert(rng.randrange(len(work)), vanish(session, body))
            return [texts for texts in await asyncio.gather(*work) if texts is not None]

    async def quiet(url):
        async with httpx.AsyncClient(base_url=url, timeout=60) as session:
            return [await answer(session, body) for body in bodies]

    with serving(service) as url:
        loud = sorted(asyncio.run(storm(url)))
        settle(service)
        assert loud == sorted(asyncio.run(quiet(url)))


def raw_request(body: dict) -> bytes:
    data = json.dumps(body).encode()
    head = ("POST /v1/completions HTTP/1.1", "host: x", f"content-length: {len(data)}", "", "")
    return "\r\n".join(head).encode() + data


async def shortly() -> None:
    await asyncio.sleep(0.05)


async def send_and_vanish(url: str, body: dict, read: int, arrived=shortly) -> None:
    """Send a request, read some bytes of the answer or else wait until it has arrived, drop the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    writer.write(raw_request(body))
    await writer.drain()
    if read:
        await reader.read(read)
    else:
        await arrived()
    writer.transport.abort()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_vanished_clients_free_their_pages(stream, phase):
    """Queued behind another, in the middle of a long prefill, or while decoding; in both modes."""
    executor = echoing(20, step_seconds=0.02)
    service = make_service(executor, seqs=1 if phase == "queued" else 8, tokens=1 if phase == "prefill" else 64)
    body = {"prompt": marker(1) * 3, "max_tokens": 200, "ignore_eos": True, "stream": stream}
    with serving(service) as url:
        clients = 2 if phase == "queued" else 1

        scheduler = service.engine.scheduler

        async def arrived():
            while len(scheduler.running) + len(scheduler.waiting) < clients:
                await asyncio.sleep(0.005)

        async def go():
            read = 1 if stream and phase == "decode" else 0
            await asyncio.gather(*(send_and_vanish(url, body, read, arrived) for _ in range(clients)))

        asyncio.run(go())
        settle(service, seconds=2.0)  # 200 tokens would take four seconds
        assert executor.steps < 60
        line = f'vllm:request_success_total{{engine="0",finished_reason="abort",model_name="fake"}} {clients}.0'
        wait_for(lambda: line in service.metrics.text().decode())


def test_abort_storm_leaves_the_books_balanced():
    service = make_service(echoing(20, step_seconds=0.001), seqs=8)
    rng = random.Random(0)

    async def storm(url):
        for _ in range(6):
            bodies = [
                {
                    "prompt": marker(i) * rng.randrange(1, 9),
                    "max_tokens": 100,
                    "n": rng.choice([1, 3]),
                    "stream": rng.random() < 0.5,
                }
                for i in range(16)
            ]
            await asyncio.gather(
                *(send_and_vanish(url, body, rng.choice([0, 1, 400]) if body["stream"] else 0) for body in bodies)
            )

    with serving(service) as url:
        asyncio.run(storm(url))
        settle(service)
        service.engine.scheduler.check_integrity()
        with httpx.Client(base_url=url) as client:
            body = {"prompt": marker(3), "max_tokens": 16, "temperature": 0, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == TOKENIZER.decode(
                marker(3) * 2
            )


def test_idle_server_uses_no_cpu():
    import time

    service = make_service()
    with serving(service) as url, httpx.Client(base_url=url) as client:
        client.get("/health")
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.1
