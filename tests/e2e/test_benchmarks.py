"""Benchmarks do not rot: each is imported, and three run on a tiny plan."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.emulator import ranked

FOLDER = Path(__file__).parents[2] / "benchmarks"
LIBRARIES = ("__init__", "common", "accuracy_peers", "peer_files")
NAMES = sorted(p.stem for p in FOLDER.glob("*.py") if p.stem not in LIBRARIES)


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
    load = ("--concurrency", 4, "--requests", 6, "--input-len", 20, "--output-len", 100)
    served = row("benchmarks.serve", plan("llama"), *load, "--share", 1)
    assert served["step_ms"] > 0
    assert served["outside_share"] == pytest.approx(
        served["between_ms"] / (served["step_ms"] + served["between_ms"]), rel=1e-3
    )
    assert served["output_tokens_per_s"] > 0
    assert served["ttft_ms_p50"] <= served["ttft_ms_p99"]


def test_a_worker_says_when_each_token_was_there(plan) -> None:
    asked = [{"prompts": [[5] * 9000], "tokens": 1}, {"prompts": [[5, 6, 7], [8, 9]], "tokens": 4}]
    lines = "".join(json.dumps(a) + "\n" for a in asked)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peer_worker", "planc", str(plan("llama")), "bf16", "1"],
        input=lines, capture_output=True, text=True, timeout=60, cwd=FOLDER.parent,
    )  # fmt: skip
    ready, refusal, answer = map(json.loads, done.stdout.splitlines())
    assert ready == {"ready": True}
    assert [len(own) for own in answer["times"]] == [4, 4]
    for own in answer["times"]:
        assert 0 < own[0] < own[1] < own[2] < own[3]
    assert "RequestError" in refusal["error"]


def test_peers_are_compared_by_the_best_of_them() -> None:
    from benchmarks.vs_peers import table

    cells = {
        ("decode-1", "planc"): 150, ("decode-1", "a"): 90, ("decode-1", "b"): 100, ("serve", "planc"): 360,
        ("serve", "b"): 200, ("load", "planc"): 0.5, ("load", "a"): 2, ("load", "b"): 1, ("prefix", "planc"): 0.07,
    }  # fmt: skip
    rows = [{"model": "m", "bits": "int8", "case": c, "side": s, "value": v} for (c, s), v in cells.items()]
    _, head, _, *lines = table(rows)
    assert head == "| m, int8 | planc | a | b | planc / best | to reach | reached |"
    assert lines == [
        "| decode-1 | 150 | 90 | 100 | 1.50 | 1.6 | no |",
        "| serve | 360 |  | 200 | 1.80 | 1.8 | yes |",
        "| prefix | 0.07 |  |  |  | at most 0.06 | no |",
        "| load | 0.5 | 2 | 1 | 0.50 |  |  |",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_the_check_of_a_gpu_runs_on_an_emulated_one(plan, tp: int) -> None:
    args = ["benchmarks.gpu_check", plan("llama", "bf16", "sm_90a", tp=tp), "--emulated", "--runs", 1]
    done = subprocess.run(
        [sys.executable, "-m", *map(str, args)], capture_output=True, text=True, timeout=300, cwd=FOLDER.parent
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(r["ok"] for r in rows if "ok" in r)
    assert {r["step"] for r in rows if "ms" in r and "step" in r} == {"decode", "prefill"}


def test_what_ranks_do_together_is_checked_on_one_gpu(tmp_path, capsys) -> None:
    from benchmarks import gpu_ranks

    root, plan = ranked.write_plan(tmp_path / "plan", "all_reduce", 1000, count=3)
    assert gpu_ranks.check(root, plan, runs=2, emulated=True)
    (found,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (found["kernel"], found["ranks"], found["elements"], found["ok"]) == ("all_reduce_one_shot", 3, 1000, True)


def test_a_side_is_judged_by_kl_and_perplexity() -> None:
    from benchmarks.accuracy import Side, Truth

    rng = np.random.default_rng(0)
    p, q = (4 * rng.standard_normal((70, 900)).astype(np.float32) for _ in range(2))
    q[:40] = p[:40] + 1e-3 * q[:40] + 7  # some nearly equal, but for what softmax does not see
    ids = [int(i) for i in rng.integers(0, 900, 70)]
    side = Side("x", lambda ids: q)
    side.add(Truth(p), ids)
    lp, lq = (x.astype(np.float64) - np.log(np.exp(x.astype(np.float64)).sum(-1, keepdims=True)) for x in (p, q))
    kl = (np.exp(lp) * (lp - lq)).sum(-1)
    assert side.figures["mean_kl"] == pytest.approx(kl.mean(), rel=1e-4)
    assert side.figures["top1"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())
    nll = -lq[np.arange(69), ids[1:]].mean()
    assert side.figures["perplexity"] == pytest.approx(np.exp(nll), rel=1e-5)
    near = Side("y", lambda ids: q[:40])
    near.add(Truth(p[:40]), ids[:40])
    assert near.kl == pytest.approx(kl[:40].sum(), rel=1e-2)
