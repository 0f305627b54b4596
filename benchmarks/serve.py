"""How does a server behave under load? Drives an OpenAI-compatible server at a given concurrency.

Prints percentiles of TTFT (send to first piece), of ITL (gap between pieces: a token without text of its own, such as
half a character, makes none) and of TPOT (first to last piece, by the tokens after the first), and tokens per second.
Tokens are counted by the server's usage, not by pieces. Prompts are random token ids, so no run hits another's cached
prefix unless --shared-prefix asks for it.

The client shares the machine with the server, so it does as little as can be while requests run: it notes when each
piece of a response came, and reads the pieces afterwards. What it used is printed as client_cpu_ms, for a token of each
stream. With --share the server notes its steps (benchmarks.timed_run): step_ms is what kernels take while all streams
decode, between_ms what passes from one of these steps to the next: Python, HTTP, and the client where it is in the way.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from benchmarks.common import median, percentiles, row, served


@dataclass
class Trace:
    """One request as the client saw it; times in seconds."""

    sent: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @cached_property
    def events(self) -> list[tuple[float, dict]]:
        """The events of the whole response, with the time at which each had come whole."""
        found, text = [], b""
        for at, piece in self.pieces:
            *lines, text = (text + piece).split(b"\n")
            found += [(at, json.loads(line[6:])) for line in lines if line.startswith(b"data: {")]
        if not found:
            raise SystemExit(f"the server did not stream: {text[:500]!r}")
        return found

    def arrivals(self) -> list[float]:
        """When its tokens came."""
        return [at for at, event in self.events if event["choices"]]

    def usage(self, name: str) -> int:
        """Tokens, as the server counts them."""
        return next(event["usage"][name] for _, event in self.events if event.get("usage"))


class Stream(asyncio.Protocol):
    """One request on a connection of its own, whose end is the response's."""

    def __init__(self, request: bytes) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self._request = request
        self._trace = Trace(time.perf_counter())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._trace.pieces.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self.done.set_result(self._trace)


def request_of(host: str, model: str, prompt: list[int], output_len: int) -> bytes:
    """A streamed completion of exactly `output_len` tokens."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": output_len, "ignore_eos": True, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def drive(url: str, args: argparse.Namespace) -> list[Trace]:
    """All requests, at most `concurrency` at a time."""
    rng = random.Random(args.seed)
    gate = asyncio.Semaphore(args.concurrency)
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    shared = [rng.randrange(*args.ids) for _ in range(args.shared_prefix)]
    address = urlsplit(url)

    async def one() -> Trace:
        prompt = shared + [rng.randrange(*args.ids) for _ in range(args.input_len - args.shared_prefix)]
        request = request_of(address.netloc, model, prompt, args.output_len)
        async with gate:
            loop = asyncio.get_running_loop()
            _, stream = await loop.create_connection(lambda: Stream(request), address.hostname, address.port or 80)
            return await stream.done

    return await asyncio.gather(*(one() for _ in range(args.requests)))


def shares(file: Path, streams: int) -> dict[str, float]:
    """Medians over the steps of so many tokens that follow each other, and what is between them as a share of both."""
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    pairs = [(one, other) for one, other in pairwise(steps) if one[0] == other[0] == streams]
    if not pairs:
        raise SystemExit(f"no two steps in a row had {streams} tokens; give --output-len more")
    step = median([end - start for (_, start, end), _ in pairs])
    between = median([other[1] - one[2] for one, other in pairs])
    return {"step_ms": step * 1e3, "between_ms": between * 1e3, "outside_share": between / (step + between)}


@dataclass
class Load:
    """What one or several drives of the server gave."""

    traces: list[Trace] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def drive(self, url: str, args: argparse.Namespace) -> None:
        """Once more."""
        start, used = time.perf_counter(), time.process_time()
        self.traces += asyncio.run(drive(url, args))
        self.seconds += time.perf_counter() - start
        self.cpu_seconds += time.process_time() - used

    def report(self, args: argparse.Namespace) -> None:
        """One row."""
        arrivals = [t.arrivals() for t in self.traces]
        ttft = percentiles([own[0] - t.sent for own, t in zip(arrivals, self.traces, strict=True)])
        itl = percentiles([b - a for own in arrivals for a, b in pairwise(own)])
        counts = [t.usage("completion_tokens") for t in self.traces]
        tpot = percentiles(
            [(own[-1] - own[0]) / (count - 1) for own, count in zip(arrivals, counts, strict=True) if count > 1]
        )
        prompts = sum(t.usage("prompt_tokens") for t in self.traces)
        row(
            benchmark="serve", concurrency=args.concurrency, requests=args.requests, input_len=args.input_len,
            output_len=args.output_len, shared_prefix=args.shared_prefix,
            **{f"ttft_ms_{k}": v * 1e3 for k, v in ttft.items()}, **{f"itl_ms_{k}": v * 1e3 for k, v in itl.items()},
            **{f"tpot_ms_{k}": v * 1e3 for k, v in tpot.items()}, output_tokens_per_s=sum(counts) / self.seconds,
            total_tokens_per_s=(sum(counts) + prompts) / self.seconds,
            client_cpu_ms=self.cpu_seconds * 1e3 / sum(counts) * args.concurrency, **self.shares,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan_or_url", help="a plan, which is then served, or the address of a running server")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--shared-prefix", type=int, default=0)
    parser.add_argument(
        "--ids",
        nargs=2,
        type=int,
        default=(100, 300),
        help="of prompts; those of whole words make a piece of each token",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=int, metavar="ROUNDS", help="of a plan: how much is not its kernels'")
    args = parser.parse_args()
    load = Load()
    if args.plan_or_url.startswith("http"):
        if args.share:
            parser.error("--share times the steps of a plan; pass one instead of an address")
        load.drive(args.plan_or_url, args)
    else:
        plan = Path(args.plan_or_url)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "steps"
            timed = (sys.executable, "-m", "benchmarks.timed_run", str(file))
            with served(plan, command=timed) if args.share else served(plan) as (url, _):
                for round_ in range(args.share or 1):
                    args.seed += round_
                    load.drive(url, args)
            load.shares = shares(file, args.concurrency) if args.share else {}
    load.report(args)


if __name__ == "__main__":
    main()
