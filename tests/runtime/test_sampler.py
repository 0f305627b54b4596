"""Token choice: right distributions, filters exact, the stream keyed by seed and position alone."""

import numpy as np
import pytest

from planc.runtime.errors import RequestError
from planc.runtime.sampler import logprobs_of, sample, uniform
from planc.runtime.sequence import SamplingParams, Sequence

RNG = np.random.default_rng(0)


def sequence(params=None, tokens=(1, 2, 3), prompt_len=None, seed=0, number=0, **settings):
    params = params or SamplingParams(**settings)
    return Sequence(number, list(tokens), len(tokens) if prompt_len is None else prompt_len, params, seed=seed)


def draws(logits, count, **settings):
    """Tokens drawn at `count` positions of one stream."""
    seq = sequence(**settings)
    found = []
    for position in range(count):
        seq.tokens = [0] * (position + 1)
        found.append(sample(logits, seq, ()))
    return np.array(found)


def softmax(logits):
    e = np.exp(logits.astype(np.float64) - logits.max())
    return e / e.sum()


def check_distribution(found, expected):
    """Chi-square of observed counts; the bound is far beyond chance for these sizes."""
    counts = np.bincount(found, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    live = expected > 0
    wanted = expected[live] * len(found)
    chi2 = ((counts[live] - wanted) ** 2 / wanted).sum()
    freedom = live.sum() - 1
    assert chi2 < freedom + 6 * np.sqrt(2 * freedom) + 6


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("vocab", [16, 1000])
def test_temperature_gives_the_softmax(temperature, vocab):
    logits = RNG.normal(size=vocab).astype(np.float32)
    check_distribution(draws(logits, 3000, temperature=temperature), softmax(logits / temperature))


def test_filters_cut_exactly():
    logits = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05])).astype(np.float32)[[3, 0, 4, 1, 2]]
    p = softmax(logits)
    for settings, kept in (
        ({"top_k": 2}, [1, 3]),
        ({"top_p": 0.5}, [1, 3]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.86}, [0, 1, 3, 4]),
        ({"min_p": 0.3}, [1, 3, 4]),
        ({"top_k": 3, "top_p": 0.8}, [1, 3]),
        ({"min_p": 0.3, "top_k": 4}, [1, 3, 4]),
    ):
        expected = np.where(np.isin(np.arange(5), kept), p, 0)
        check_distribution(draws(logits, 1500, **settings), expected / expected.sum())


def test_top_p_over_a_flat_and_large_vocabulary():
    """More candidates than the first look takes."""
    logits = (RNG.normal(size=5000) * 0.1).astype(np.float32)
    order = np.argsort(-logits, kind="stable")
    cumulative = softmax(logits)[order].cumsum()
    kept = set(order[: int(np.searchsorted(cumulative, 0.6)) + 1].tolist())
    found = draws(logits, 800, top_p=0.6)
    assert set(found.tolist()) <= kept
    assert len(set(found.tolist())) > 400


def test_greedy_top_k_one_and_ties_take_the_first():
    logits = np.array([0, 5, 5, 1], np.float32)
    for settings in ({"temperature": 0}, {"temperature": 1e-9}, {"top_k": 1}, {"temperature": 3, "top_k": 1}):
        assert sample(logits, sequence(**settings), ()) == 1
    assert set(draws(logits, 50, top_k=2).tolist()) == {1, 2}
    assert set(draws(np.zeros(9, np.float32), 100, top_k=3).tolist()) == {0, 1, 2}


def test_stream_depends_on_seed_sample_and_position_only():
    assert uniform(1, 0, 5) == uniform(1, 0, 5)
    values = {uniform(seed, number, position) for seed in range(4) for number in range(4) for position in range(50)}
    assert len(values) == 800
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)
    assert all(0 <= value < 1 for value in values)
    logits = RNG.normal(size=100).astype(np.float32)
    first, second = sequence(seed=9, number=1), sequence(tokens=(7, 8, 9), seed=9, number=55)
    assert sample(logits, first, ()) == sample(logits, second, ())


def test_uniform_is_the_first_number_of_numpys_philox():
    for seed, number, position in ((0, 0, 0), (1, 2, 3), (-1, 0, 7), (2**63 - 1, 5, 2**31), (-(2**63), 2**40, 1)):
        key = np.array([seed % 2**64, number], np.uint64)
        assert (
            uniform(seed, number, position) == np.random.Generator(np.random.Philox(key=key, counter=position)).random()
        )


def test_uniform_is_uniform_over_positions_and_over_seeds():
    for values in ([uniform(3, 0, i) for i in range(4000)], [uniform(i, 0, 7) for i in range(4000)]):
        counts, _ = np.histogram(values, 20, (0, 1))
        assert ((counts - 200) ** 2 / 200).sum() < 60


def test_logits_are_left_alone_and_rows_may_be_views():
    logits = RNG.normal(size=(3, 50)).astype(np.float32)
    before = logits.copy()
    seq = sequence(repetition_penalty=2, logit_bias=((1, 5.0),), allowed_token_ids=(1, 2), min_tokens=1, max_tokens=2)
    sample(logits[1], seq, (0,))
    assert (logits == before).all()


def test_repetition_penalty_sees_prompt_and_output():
    logits = np.array([2.0, -1.0, 1.5, 0.5], np.float32)
    seq = sequence(tokens=(0, 1), prompt_len=1, temperature=0, repetition_penalty=2.0)
    assert sample(logits, seq, ()) == 2  # 0 falls to 1.0
    seq = sequence(tokens=(0, 2), prompt_len=1, temperature=0, repetition_penalty=1.9)
    assert sample(logits, seq, ()) == 0  # 2/1.9 against 1.5/1.9
    flipped = np.array([-1.0, -1.5], np.float32)
    assert sample(flipped, sequence(tokens=(0,), temperature=0, repetition_penalty=2.0), ()) == 1  # -1 becomes -2


def test_presence_and_frequency_see_the_output_only():
    logits = np.array([2.0, 1.0, 0.0], np.float32)
    assert sample(logits, sequence(tokens=(0, 0, 0), temperature=0, presence_penalty=2.0), ()) == 0
    assert sample(logits, sequence(tokens=(2, 0), prompt_len=1, temperature=0, presence_penalty=1.5), ()) == 1
    spared = sequence(tokens=(0, 0, 0, 2), prompt_len=3, temperature=0, presence_penalty=1.5)
    assert sample(logits, spared, ()) == 0
    once = sequence(tokens=(2, 0), prompt_len=1, temperature=0, frequency_penalty=0.4)
    thrice = sequence(tokens=(2, 0, 0, 0), prompt_len=1, temperature=0, frequency_penalty=0.4)
    assert (sample(logits, once, ()), sample(logits, thrice, ())) == (0, 1)


def test_bias_allowed_and_min_tokens():
    logits = np.array([3.0, 2.0, 1.0, 0.0], np.float32)
    assert sample(logits, sequence(temperature=0, logit_bias=((3, 100.0),)), ()) == 3
    assert sample(logits, sequence(temperature=0, allowed_token_ids=(2, 3)), ()) == 2
    assert sample(logits, sequence(temperature=0, min_tokens=1, stop_token_ids=(1,)), (0,)) == 2
    later = sequence(tokens=(1, 2), prompt_len=1, temperature=0, min_tokens=1)
    assert sample(logits, later, (0,)) == 0
    assert set(draws(logits, 100, allowed_token_ids=(1, 3), temperature=5.0).tolist()) == {1, 3}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_error(bad):
    logits = np.array([0, bad, 1], np.float32)
    for settings in ({"temperature": 0}, {"temperature": 1}):
        with pytest.raises(ValueError, match="not finite"):
            sample(logits, sequence(**settings), ())
    with pytest.raises(ValueError, match="not finite"):
        sample(np.full(3, -np.inf, np.float32), sequence(), ())


def test_minus_infinity_is_never_drawn():
    logits = np.array([-np.inf, 0, -np.inf, 0, -np.inf], np.float32)
    assert set(draws(logits, 200).tolist()) == {1, 3}
    assert set(draws(logits, 200, top_p=0.9999999).tolist()) == {1, 3}


def test_logprobs():
    logits = (RNG.normal(size=3000) * 4 + 300).astype(np.float32)
    expected = np.log(softmax(logits))
    found = logprobs_of(logits, 17, 5)
    assert found.logprob == pytest.approx(expected[17], abs=1e-4)
    assert [token for token, _ in found.top] == np.argsort(-expected)[:5].tolist()
    assert logprobs_of(logits, 17, 0).top == ()


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ("",)}, "stop"),
    ],
)
def test_params_are_validated(settings, param):
    with pytest.raises(RequestError) as refused:
        SamplingParams(**settings)
    assert refused.value.param == param
