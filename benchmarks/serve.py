"""How does a server behave under load? Drives an OpenAI-compatible server at a given concurrency.

Prints percentiles of TTFT (send to first token) and ITL (gap between tokens), and tokens per second. Output tokens are
counted by the server's usage, not by chunks. Prompts are random token ids, so no run hits another's cached prefix
unless --shared-prefix asks for it.
"""

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.common import percentiles, row, served


@dataclass
class Trace:
    """One request as the client saw it; times in seconds."""

    sent: float
    arrivals: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0


async def ask(client: httpx.AsyncClient, url: str, model: str, prompt: list[int], output_len: int) -> Trace:
    """Streams one completion of exactly `output_len` tokens."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": output_len, "ignore_eos": True, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    trace = Trace(time.perf_counter())
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if event["choices"]:
                trace.arrivals.append(time.perf_counter())
            if event.get("usage"):
                trace.output_tokens = event["usage"]["completion_tokens"]
                trace.prompt_tokens = event["usage"]["prompt_tokens"]
    return trace


async def drive(url: str, args: argparse.Namespace) -> list[Trace]:
    """All requests, at most `concurrency` at a time."""
    rng = random.Random(args.seed)
    gate = asyncio.Semaphore(args.concurrency)
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=args.concurrency)) as client:
        model = (await client.get(f"{url}/v1/models")).json()["data"][0]["id"]
        shared = [rng.randrange(100, 250) for _ in range(args.shared_prefix)]

        async def one() -> Trace:
            prompt = shared + [rng.randrange(100, 250) for _ in range(args.input_len - args.shared_prefix)]
            async with gate:
                return await ask(client, url, model, prompt, args.output_len)

        return await asyncio.gather(*(one() for _ in range(args.requests)))


def report(traces: list[Trace], seconds: float, args: argparse.Namespace) -> None:
    """One row."""
    ttft = [t.arrivals[0] - t.sent for t in traces]
    itl = [b - a for t in traces for a, b in zip(t.arrivals, t.arrivals[1:], strict=False)]
    row(
        benchmark="serve", concurrency=args.concurrency, requests=args.requests, input_len=args.input_len,
        output_len=args.output_len, shared_prefix=args.shared_prefix,
        **{f"ttft_ms_{k}": v * 1e3 for k, v in percentiles(ttft).items()},
        **{f"itl_ms_{k}": v * 1e3 for k, v in percentiles(itl).items()},
        output_tokens_per_s=sum(t.output_tokens for t in traces) / seconds,
        total_tokens_per_s=sum(t.output_tokens + t.prompt_tokens for t in traces) / seconds,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan_or_url", help="a plan, which is then served, or the address of a running server")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--shared-prefix", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.plan_or_url.startswith("http"):
        measure(args.plan_or_url, args)
    else:
        with served(Path(args.plan_or_url)) as (url, _):
            measure(url, args)


def measure(url: str, args: argparse.Namespace) -> None:
    """Drives the server and prints the row."""
    start = time.perf_counter()
    traces = asyncio.run(drive(url, args))
    report(traces, time.perf_counter() - start, args)


if __name__ == "__main__":
    main()
