"""The same tokens every time: a sequence's logits are equal to the bit, whatever else runs and however it is cut."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planc.plans import store
from planc.runtime.engine import Engine
from planc.runtime.executors import open_executor
from planc.runtime.scheduler import SchedulerLimits
from planc.runtime.sequence import SamplingParams
from planc.runtime.tokenizer import Tokenizer
from tests.e2e.rig import run

CASES = [  # architecture, dtype, cache: one of each kind, and more in the nightly run
    ("llama", "bf16"),
    ("llama", "int8"),
    ("llama", "fp8"),
    ("llama", "awq-g32"),
    ("llama", "int4-g32"),
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


WAYS = [
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=24, ignore_eos=True),
    SamplingParams(top_k=20, presence_penalty=0.5, frequency_penalty=0.3, seed=2, max_tokens=24, ignore_eos=True),
    SamplingParams(min_p=0.02, logit_bias=((5, 3.0),), seed=3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.5, seed=4, logprobs=2, max_tokens=24, ignore_eos=True),
]


def drawn(
    path: Path, prompts: list[list[int]], ways: list[SamplingParams], *, blocks: int = 256, host=False, again=False
):
    """Tokens of all prompts together, by the program or by the host's sampler; and how often one was preempted."""
    loaded = store.load(path)
    executor = open_executor(path, loaded, blocks, 2)
    limits = SchedulerLimits(loaded.limits.max_model_len, 16, 48)
    engine = Engine(executor, Tokenizer.load(path / "tokenizer"), limits, prefix_caching=again)
    assert executor.samples
    if host:
        engine._sampler = None
    try:
        for _ in range(1 + again):
            outputs = engine.generate(prompts, ways)
        return [list(o.token_ids) for o in outputs], engine.scheduler.preemptions
    finally:
        engine.close()


def test_drawn_tokens_are_the_hosts_alone_together_cached_and_preempted(plan) -> None:
    path = plan("llama", "bf16")
    prompts = prompts_of(5, [40, 3, 77, 18, 33])
    want, _ = drawn(path, prompts, WAYS, host=True)
    alone = [drawn(path, [prompt], [way])[0][0] for prompt, way in zip(prompts, WAYS, strict=True)]
    assert alone == want
    assert drawn(path, prompts, WAYS)[0] == want
    assert drawn(path, prompts, WAYS, again=True)[0] == want
    crowded, preemptions = drawn(path, prompts, WAYS, blocks=14)
    assert preemptions
    assert crowded == want
