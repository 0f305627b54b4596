"""Benchmarks do not rot: each is imported, and three run on a tiny plan."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
NAMES = sorted(p.stem for p in FOLDER.glob("*.py") if p.stem not in ("__init__", "common", "accuracy_peers"))


@pytest.mark.parametrize("name", NAMES)
def test_each_imports(name: str) -> None:
    assert callable(importlib.import_module(f"benchmarks.{name}").main)


def row(*args: object) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", *map(str, args)], capture_output=True, text=True, timeout=120, cwd=FOLDER.parent
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_startup_and_serve_print_a_row(plan) -> None:
    startup = row("benchmarks.startup", plan("llama"), "--runs", 1)
    assert 0 < startup["ready_s"] < startup["first_token_http_s"]
    load = ("--concurrency", 4, "--requests", 6, "--input-len", 20, "--output-len", 5)
    served = row("benchmarks.serve", plan("llama"), *load)
    assert served["output_tokens_per_s"] > 0
    assert served["ttft_ms_p50"] <= served["ttft_ms_p99"]


@pytest.mark.slow
def test_the_check_of_a_gpu_runs_on_an_emulated_one(plan) -> None:
    args = ["benchmarks.gpu_check", plan("llama", "bf16", "sm_90a"), "--emulated", "--runs", 1]
    done = subprocess.run(
        [sys.executable, "-m", *map(str, args)], capture_output=True, text=True, timeout=300, cwd=FOLDER.parent
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(r["ok"] for r in rows if "ok" in r)
    assert {r["step"] for r in rows if "ms" in r and "step" in r} == {"decode", "prefill"}
