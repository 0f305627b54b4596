"""How long from the command to the first token? Starts `planc run` anew each time, with a warm page cache."""

import argparse
import subprocess
import time
from pathlib import Path

import httpx

from benchmarks.common import PLANC, median, row, served


def first_token_over_http(plan: Path) -> tuple[float, float]:
    """Seconds from the start of the process to /health, and to the first streamed token."""
    start = time.perf_counter()
    with served(plan) as (url, ready):
        body = {"model": "", "prompt": "The capital of France is", "max_tokens": 1, "temperature": 0, "stream": True}
        body["model"] = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            next(response.iter_lines())
            return ready, time.perf_counter() - start


def first_token_offline(plan: Path) -> float:
    """Seconds of `planc run PLAN --prompt ... --max-tokens 1`, the whole process."""
    start = time.perf_counter()
    command = [*PLANC, "run", str(plan), "--prompt", "Hello", "--max-tokens", "1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    first_token_offline(args.plan)
    http = [first_token_over_http(args.plan) for _ in range(args.runs)]
    offline = [first_token_offline(args.plan) for _ in range(args.runs)]
    row(
        benchmark="startup", plan=args.plan.name, runs=args.runs, ready_s=median([r for r, _ in http]),
        first_token_http_s=median([t for _, t in http]), one_prompt_process_s=median(offline),
    )  # fmt: skip


if __name__ == "__main__":
    main()
