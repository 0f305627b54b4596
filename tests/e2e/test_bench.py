"""`planc bench`: every launch is timed and counted once, and what cannot be measured is refused by name."""

import json
from dataclasses import replace

import numpy as np
import pytest

from planc.cli import main
from planc.compiler.ir import text
from planc.compiler.ir.ops import OPS
from planc.plans import store
from planc.runtime.batch import Piece, packed
from planc.runtime.cpu import CpuExecutor


def run(capsys, *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as done:
        main(["bench", *args])
    return int(done.value.code or 0), *capsys.readouterr()


def test_rates_and_a_row_for_each_kernel(plan, capsys) -> None:
    root = plan("llama", "int8")
    sizes = ("--batch", "2", "--batch", "5", "--input-len", "100", "--output-len", "3")
    code, out, err = run(capsys, str(root), *sizes, "--threads", "1", "--json")
    assert code == 0
    assert "decode of 5 sequences" in err
    report = json.loads(out)
    assert (report["dtype"], report["threads"]) == ("int8", 1)
    assert min(report["limits"].values()) > 0.1
    graph = text.parse((root / store.GRAPH).read_text())
    launches = sum(not OPS[n.op].view for n in graph.nodes)
    assert [(c["step"], c["tokens"], c["context"]) for c in report["cases"]] == [
        ("prefill", 100, 64),  # of a step, max_num_batched_tokens
        ("decode", 2, 101),
        ("decode", 5, 101),
    ]
    for case in report["cases"]:
        assert sum(k["launches"] for k in case["kernels"]) == launches
        assert sum(k["share"] for k in case["kernels"]) == pytest.approx(1)
        assert case["tokens_per_s"] == pytest.approx(case["tokens"] / case["milliseconds"] * 1e3)
        busy = [k for k in case["kernels"] if k["kernel"].startswith("qlinear")]
        assert busy
        assert all(k["gops"] > 0 and k["roofline"] > 0 for k in busy)


def test_people_get_a_table_of_what_the_plan_holds(plan, capsys) -> None:
    code, out, _ = run(capsys, str(plan("llama", "int8")), "--batch", "1")
    assert code == 0
    assert "prefill, 224 tokens, context 64: " in out
    assert "decode, batch 1, context 225: " in out
    assert "paged_attention" in out


def test_a_step_that_is_timed_computes_the_same(plan) -> None:
    root = plan("llama", "int8")
    executor = CpuExecutor(root, store.load(root), 4, 1)
    batch = packed([Piece([5, 6, 7], 0, 0), Piece([9], 0, 2)], executor.block_size)
    want = executor.step(batch).copy()
    took = executor.profile(batch)
    assert (took >= 0).all()
    assert took.sum() > 0
    np.testing.assert_array_equal(executor._logits[:2], want)
    executor.close()


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--batch", "17"), 2, r"--batch 17 is more than the plan's 16 sequences"),
        (("--input-len", "250", "--output-len", "7"), 2, r"make more than the plan's 256 tokens"),
        (("--input-len", "0"), 2, r"--batch, --input-len and --output-len are at least 1"),
        (("--threads", "0"), 2, r"--threads is 0"),
    ],
)
def test_sizes_beyond_the_plans_are_refused(plan, capsys, args: tuple[str, ...], code: int, message: str) -> None:
    got, _, err = run(capsys, str(plan("llama", "int8")), *args)
    assert got == code
    assert message in err


def test_plans_of_ranks_are_refused(plan, capsys, monkeypatch) -> None:
    one = store.load(plan("llama", "int8"))
    monkeypatch.setattr(store, "load", lambda root: replace(one, limits=replace(one.limits, ranks=2)))
    code, _, err = run(capsys, "plan")
    assert code == 1
    assert "has 2 ranks; planc bench measures plans of one" in err
