"""What the benchmarks share: a server around a plan, medians, and one JSON row a measurement."""

import json
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

PLANC = [sys.executable, "-m", "planc"]


def row(**fields: object) -> None:
    """Prints one measurement as a line of JSON."""
    print(json.dumps({k: _rounded(v) if isinstance(v, float) else v for k, v in fields.items()}), flush=True)


def _rounded(v: float) -> float:
    """Four places, or four digits of what is smaller."""
    return round(v, 4) if abs(v) >= 1 else float(f"{v:.4g}")


def median(values: list[float]) -> float:
    """The median of some figures."""
    return float(statistics.median(values))


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p90 and p99 of some figures; NaN when there are none."""
    ranked = sorted(values)
    if not ranked:
        return dict.fromkeys(("p50", "p90", "p99"), float("nan"))
    return {f"p{p}": ranked[min(len(ranked) - 1, len(ranked) * p // 100)] for p in (50, 90, 99)}


def peak_rss_of_children() -> int:
    """Bytes: the largest resident set of any finished child process."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def build(model: str, out: Path, *flags: str) -> float:
    """Builds a plan, replacing one that is there; seconds."""
    start = time.perf_counter()
    subprocess.run([*PLANC, "build", "--model", model, "-o", str(out), "--force", *flags], check=True)
    return time.perf_counter() - start


@contextmanager
def served(plan: Path, *flags: str, command: Sequence[str] = (*PLANC, "run")) -> Iterator[tuple[str, float]]:
    """A server of the plan by a command; gives its address and the seconds until /health answered."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    start = time.perf_counter()
    server = subprocess.Popen([*command, str(plan), "--port", str(port), *flags], stdout=subprocess.DEVNULL)
    try:
        while server.poll() is None:
            try:
                httpx.get(f"{url}/health", timeout=1).raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.01)
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        yield url, time.perf_counter() - start
    finally:
        server.terminate()
        server.wait(timeout=60)


def load_weights(model: Any, source: Any) -> None:
    """Fills a transformers model with a source's tensors, as the compiler binds them."""
    import torch

    from planc.compiler.ir.recipe import evaluate
    from planc.compiler.source.bind import bind

    binding = bind(model, source)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            array = evaluate(binding.recipe(name), source.read, {}, source.read_rows)
            parameter.copy_(torch.from_numpy(np.asarray(array, np.float32)))
