"""Plans of two ranks end to end: one rank's logits, the same bits every time, clear words where it cannot be."""

from pathlib import Path

import numpy as np
import pytest

from planc.plans import store
from planc.plans.diff import diff
from tests.e2e.rig import run
from tests.e2e.test_build import SMALL, build, planc, refused

CASES = [  # one of each kind, and more in the nightly run
    ("llama", "f32"),
    pytest.param(("gpt2", "f32"), marks=pytest.mark.slow),
    pytest.param(("mixtral", "bf16"), marks=pytest.mark.slow),
    pytest.param(("gemma2", "bf16"), marks=pytest.mark.slow),
    pytest.param(("llama", "int8"), marks=pytest.mark.slow),
    pytest.param(("llama", "bf16", "int8"), marks=pytest.mark.slow),
]


def prompts_of(seed: int, lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 330, n).tolist() for n in lengths]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_logits_are_those_of_one_rank_and_the_same_bits_every_time(plan, case: tuple[str, ...]) -> None:
    arch, dtype, *kv = case
    one, two = (plan(arch, dtype, kv=kv[0] if kv else "auto", tp=tp) for tp in (1, 2))
    first, *others = prompts_of(3, [70, 1, 33, 90])
    alone, again = run(two, [first]), run(two, [first], threads=4)
    np.testing.assert_array_equal(alone.logits[0], again.logits[0])
    batched = run(two, [first, *others])
    np.testing.assert_array_equal(alone.logits[0], batched.logits[0])
    cached = run(two, [first, *others], prefix_caching=True, rounds=2)
    assert cached.prefix_hits > 0
    np.testing.assert_array_equal(alone.logits[0], cached.logits[0])
    want = run(one, [first]).logits[0]
    exact = dtype != "int8" and not kv  # what is rounded by rank is rounded elsewhere
    error = np.abs(alone.logits[0][0] - want[0]).max() / np.abs(want[0]).max()
    assert error < (2e-6 if exact else 0.05)


def test_goldens_are_made_and_verified_by_all_ranks(plan, tmp_path: Path) -> None:
    path = plan("llama", tp=2)
    made = store.load(path)
    assert made.limits.ranks == 2
    assert made.weight_files[1:] == ("weights/rank0.safetensors", "weights/rank1.safetensors")
    whole = store.load(plan("llama"))
    assert made.memory.weights < 0.6 * whole.memory.weights
    assert made.memory.kv_token * 2 == whole.memory.kv_token
    assert [g.tokens for g in made.goldens] == [g.tokens for g in whole.goldens]
    done = planc("verify", path)
    assert (done.returncode, done.stdout.count("equal")) == (0, len(made.goldens))
    assert planc("check", path).returncode == 0
    shown = planc("inspect", path).stdout
    assert "Memory of each of 2 ranks" in shown
    refused(planc("export", path, "--onnx", tmp_path / "x.onnx"), 1, "split over 2 ranks", "--tp 1")


@pytest.mark.slow
def test_a_rebuild_gives_the_same_bytes(plan, model, tmp_path: Path) -> None:
    assert build(model("llama"), tmp_path / "again", "--max-model-len", "256", "--tp", "2").returncode == 0
    assert diff(plan("llama", tp=2), tmp_path / "again") == []


def test_weights_none_says_what_a_rank_needs(model, tmp_path: Path) -> None:
    done = build(model("llama"), tmp_path / "plan", "--tp", "2", "--weights", "none", "--max-model-len", "256")
    assert done.returncode == 0, done.stderr
    assert "memory of each of 2 ranks" in done.stdout
    refused(planc("verify", tmp_path / "plan"), 1, "has no goldens")
    assert planc("run", tmp_path / "plan", "--prompt", "a").stderr.count("--weights none")


def test_ranks_that_cannot_be_are_refused(model, tmp_path: Path) -> None:
    out = tmp_path / "plan"
    refused(build(model("llama"), out, "--tp", "0"), 2, "--tp must be at least 1, got 0")
    refused(build(model("llama"), out, "--tp", "3"), 2, "--tp 3 does not divide the 4 query heads", "1, 2 and 4 divide")
    flags = ("--model", model("llama"), "-o", out, *SMALL[:-2], "--tp", "2", "--auto-mixed")
    refused(planc("build", *flags), 2, "--auto-mixed", "--tp 1", "--quant-config")
    assert not out.exists()
