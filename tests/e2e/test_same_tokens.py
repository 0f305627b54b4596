"""The same tokens every time: a sequence's logits are equal to the bit, whatever else runs and however it is cut."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.e2e.rig import run

CASES = [  # architecture, dtype, cache: one of each kind, and more in the nightly run
    ("llama", "bf16"),
    ("llama", "int8"),
    ("llama", "fp8"),
    ("llama", "awq-g32"),
    ("mistral", "f32"),  # sliding
    ("gpt_neox", "f32"),  # parallel residual
    ("mixtral", "bf16"),  # experts
    ("llama4_text", "f32"),  # chunked, experts
    ("bloom", "bf16"),  # alibi
    ("gpt2", "f32"),  # learned positions
    ("deepseek_v3", "f32"),  # latent attention, experts
    ("llama", "bf16", "fp8"),  # caches in 8 bits
    ("deepseek_v3", "f32", "int8"),
]
MORE = [
    ("llama", "f32"),
    ("gemma2", "bf16"),
    ("mixtral", "int8"),
    ("mixtral", "fp8-block"),
    ("llama", "bf16", "int8"),
    ("deepseek_v3", "f32", "fp8"),
    ("bloom", "f32", "int8"),
]
ALL = [pytest.param(c, id="-".join(c)) for c in CASES]
ALL += [pytest.param(c, id="-".join(c), marks=pytest.mark.slow) for c in MORE]


def plan_of(plan, case: tuple[str, ...]) -> Path:
    arch, dtype, *kv = case
    return plan(arch, dtype, kv=kv[0] if kv else "auto")


def prompts_of(seed: int, lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 330, n).tolist() for n in lengths]


@pytest.mark.parametrize("case", ALL)
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 150))
def test_logits_are_bit_equal(plan, case: tuple[str, ...], seed: int, length: int) -> None:
    path = plan_of(plan, case)
    rng = np.random.default_rng(seed)
    prompt, *others = prompts_of(seed, [length, *rng.integers(1, 120, 15).tolist()])
    alone = run(path, [prompt])
    want = alone.logits[0]
    assert np.isfinite(want).all()
    assert len(want) == 12

    def same(result, what: str) -> None:
        assert result.tokens[0] == alone.tokens[0], what
        assert (result.logits[0].view(np.uint32) == want.view(np.uint32)).all(), what

    same(run(path, [prompt, *others]), "batched with 15 others")
    for chunk in (1, 7, 16, 64):
        same(run(path, [prompt], seqs=1, tokens=chunk), f"in chunks of {chunk}")
    same(run(path, [prompt], threads=1), "on one thread")
    cached = run(path, [prompt], prefix_caching=True, rounds=2)
    same(cached, "from the prefix cache")
    assert cached.prefix_hits == (length - 1) // 16 * 16


@pytest.mark.parametrize("case", ALL)
def test_logits_are_bit_equal_after_preemption(plan, case: tuple[str, ...]) -> None:
    prompts = prompts_of(1, [40, 33, 47, 38])
    path = plan_of(plan, case)
    apart = [run(path, [p], max_tokens=40) for p in prompts]
    together = run(path, prompts, max_tokens=40, blocks=13)
    assert together.preemptions > 0
    for i, one in enumerate(apart):
        assert together.tokens[i] == one.tokens[0]
        assert (together.logits[i].view(np.uint32) == one.logits[0].view(np.uint32)).all(), f"sequence {i}"


def test_the_comparison_can_fail(plan) -> None:
    path = plan("llama", "f32")
    a, b = (run(path, [p]).logits[0] for p in prompts_of(2, [20, 20]))
    assert (a != b).any()
