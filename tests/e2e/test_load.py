"""A real plan behind a real server, far too small a KV cache, 64 clients: each gets what its prompt gets alone."""

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from planc.plans import store
from planc.runtime.tokenizer import Tokenizer
from tests.e2e.rig import run

ROOT = Path(__file__).parents[2]
CLIENTS, VANISHING, BLOCKS, COUNT = 64, 16, 20, 40  # a sequence takes up to 7 blocks of 16 tokens
SHARED = 33  # tokens that every other prompt begins with, two blocks and one more


@contextlib.contextmanager
def server(plan: Path) -> Iterator[str]:
    """`planc run` as a process of its own; it must end cleanly and silently."""
    memory = BLOCKS * store.load(plan).kv.page_bytes
    command = ["run", plan, "--port", 0, "--threads", 1, "--kv-cache-memory-bytes", memory, "--served-model-name", "m"]
    process = subprocess.Popen(
        [sys.executable, "-m", "planc", *map(str, command)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert f"KV cache of {BLOCKS * 16} tokens" in process.stdout.readline()
        url = process.stdout.readline().split()[-1]
        wait_for(lambda: answers(url))
        yield url
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.ConnectError):
        return httpx.get(f"{url}/health").status_code == 200
    return False


def wait_for(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.02)


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    shared = [rng.randrange(3, 330) for _ in range(SHARED)]
    return [
        [*(shared if i % 2 else ()), *(rng.randrange(3, 330) for _ in range(rng.randrange(1, 30)))]
        for i in range(CLIENTS)
    ]


def body(prompt: list[int], count: int = COUNT) -> dict:
    return {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True}


async def client(session: httpx.AsyncClient, prompt: list[int]) -> str:
    """The text of one whole stream."""
    response = await session.post("/v1/completions", json=body(prompt))
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]] == ["length"]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def vanish(session: httpx.AsyncClient, prompt: list[int], chunks: int) -> None:
    """Leave in the middle of a stream, after so many pieces of it."""
    async with session.stream("POST", "/v1/completions", json=body(prompt, 180)) as response:
        async for _ in response.aiter_raw():
            chunks -= 1
            if chunks <= 0:
                return


async def storm(url: str, asked: list[list[int]]) -> list[str]:
    limits = httpx.Limits(max_connections=CLIENTS + VANISHING)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as session:
        leaving = [asyncio.create_task(vanish(session, asked[i], 1 + i % 5)) for i in range(VANISHING)]
        texts = await asyncio.gather(*(client(session, prompt) for prompt in asked))
        await asyncio.gather(*leaving)
    return texts


def metrics(url: str) -> dict[str, float]:
    """Values by name, labels left out; of those that a label tells apart, the sum."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = line.split("{")[0].split()[0], float(line.rsplit(" ", 1)[1])
            found[name] = found.get(name, 0.0) + value
    return found


def test_64_streams_each_as_if_alone_and_all_blocks_come_back(plan) -> None:
    path, asked = plan("llama"), prompts()
    tokenizer = Tokenizer.load(path / "tokenizer")
    alone = [tokenizer.decode(run(path, [p], max_tokens=COUNT, threads=1, blocks=16).tokens[0]) for p in asked]
    assert len(set(alone)) == CLIENTS
    with server(path) as url:
        texts = asyncio.run(storm(url, asked))
        wrong = [i for i in range(CLIENTS) if texts[i] != alone[i]]
        assert wrong == [], "those clients got another text"
        wait_for(lambda: metrics(url)["vllm:num_requests_running"] == 0)
        seen = metrics(url)
        assert seen["vllm:kv_cache_usage_perc"] == 0
        assert seen["vllm:num_requests_waiting"] == 0
        assert seen["vllm:request_success_total"] == CLIENTS + VANISHING
        assert seen["vllm:num_preemptions_total"] > 0
        assert seen["vllm:prefix_cache_hits_total"] > 0
        assert httpx.get(f"{url}/health").status_code == 200
