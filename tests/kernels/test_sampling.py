"""Tokens that the CPU's program chooses are those of the host's sampler, and a matter of their row alone."""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from planc.codegen.cpu import build_library
from planc.codegen.render import render
from planc.codegen.target import parse
from planc.plans import sampling
from planc.runtime.choice import write
from planc.runtime.cpu import _CBatch, _CChoice
from planc.runtime.sampler import sample
from planc.runtime.sequence import SamplingParams
from planc.runtime.sequence import Sequence as Stream
from tests.kernels.harness import TARGETS

BLOCK = 16
EOS = (7, 11)
Choose = Callable[..., tuple[list[int], list[float]]]

WAYS = {
    "greedy": {"temperature": 0},
    "greedy with a penalty": {"temperature": 0, "repetition_penalty": 1.7, "frequency_penalty": 0.3},
    "greedy with rewards": {"temperature": 0, "repetition_penalty": 0.6, "presence_penalty": -1.0},
    "all": {"temperature": 1.0},
    "hot": {"temperature": 50.0},
    "cold": {"temperature": 0.01},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_p of a flat row": {"temperature": 30.0, "top_p": 0.97},
    "little top_p": {"top_p": 1e-6},
    "top_k": {"top_k": 40},
    "top_k of 2": {"top_k": 2},
    "top_k of more than the blocks": {"temperature": 4.0, "top_k": 700},
    "top_k of more than the vocabulary": {"top_k": 10**6, "top_p": 0.8},
    "top_k and top_p": {"temperature": 1.3, "top_k": 50, "top_p": 0.7},
    "min_p": {"min_p": 0.05},
    "min_p, top_k and top_p": {"temperature": 2.0, "min_p": 0.02, "top_k": 90, "top_p": 0.95},
    "biases": {"logit_bias": ((3, 30.0), (5, -100.0), (3, 1.0)), "top_p": 0.9},
    "too early": {"min_tokens": 60, "max_tokens": 100, "stop_token_ids": (3,), "temperature": 0.9},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.7, "frequency_penalty": 0.2, "top_p": 0.95},
}  # fmt: skip


@pytest.fixture(scope="module", params=TARGETS)
def choose(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Choose:
    """Chooses a token of each sequence from its logits [rows, vocab], whose pages lie in no order."""
    source = render("choose_rows.cpp.jinja", {})
    path = build_library({"choose_rows.cpp": source}, parse(request.param), tmp_path_factory.mktemp("choose"))
    function = ctypes.CDLL(str(path)).planc_choose_rows
    function.restype = None

    def call(logits: np.ndarray, seqs: Sequence[Stream], threads: int = 1) -> tuple[list[int], list[float]]:
        rows, vocab = logits.shape
        width = -(-max(len(s.tokens) for s in seqs) // BLOCK)
        table = np.random.default_rng(0).permutation(rows * width).astype(np.int32).reshape(rows, width)
        history = np.full((rows * width, BLOCK), -1, np.int32)
        records = np.zeros((rows, sampling.RECORD), np.int32)
        for i, seq in enumerate(seqs):
            padded = np.full(width * BLOCK, -1, np.int32)
            padded[: len(seq.tokens)] = seq.tokens
            history[table[i]] = padded.reshape(width, BLOCK)
            write(records[i], seq, i, EOS)
        chosen, work = np.full((rows, 2), -5, np.int32), logits.copy()
        batch = _CBatch(num_seqs=rows, num_rows=rows, table_stride=width, page_table=table.ctypes.data)
        choice = _CChoice(vocab, BLOCK, *(a.ctypes.data for a in (records, history, chosen, work)))
        for thread in range(threads):
            function(ctypes.byref(batch), ctypes.byref(choice), thread, threads)
        untouched = records[:, sampling.KIND] == sampling.HOST
        assert (work[untouched] == logits[untouched]).all()
        return chosen[:, 0].tolist(), chosen.view(np.float32)[:, 1].tolist()

    return call


def stream(way: dict, vocab: int, seed: int, length: int = 50) -> Stream:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, length).tolist()
    tokens[length // 2 :] = [tokens[i] for i in rng.integers(0, length // 2, length - length // 2)]
    return Stream(seed, tokens, length // 3, SamplingParams(**way), seed=seed)


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 4.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal((rows, vocab))).astype(np.float32)


@pytest.mark.parametrize("vocab", [300, 4096, 49157])
@pytest.mark.parametrize("way", WAYS)
def test_the_token_is_that_of_the_hosts_sampler(choose: Choose, way: str, vocab: int) -> None:
    rows = 24
    logits = random_logits(rows, vocab, seed=len(way))
    seqs = [stream(WAYS[way], vocab, seed) for seed in range(rows)]
    wanted = [sample(row, seq, EOS) for row, seq in zip(logits, seqs, strict=True)]
    tokens, best = choose(logits, seqs)
    assert np.isfinite(best).all()
    others = [i for i in range(rows) if tokens[i] != wanted[i]]
    assert len(others) <= (1 if "flat" in way and vocab > 4096 else 0)
    for i in others:  # the two exponentials round to another order of what is nearly equal
        assert abs(logits[i, tokens[i]] - logits[i, wanted[i]]) < 1e-4


def test_equal_logits_are_taken_in_order(choose: Choose) -> None:
    logits = np.zeros((3, 1000), np.float32)
    logits[1, [400, 700]] = 2.0
    logits[2] = -0.0
    seqs = [stream({"temperature": 0}, 1000, seed) for seed in range(3)]
    assert choose(logits, seqs)[0] == [0, 400, 0]
    drawn = [stream({"temperature": 1.0, "top_k": 3}, 1000, seed) for seed in range(3)]
    assert choose(logits, drawn)[0] == [sample(row, seq, EOS) for row, seq in zip(logits, drawn, strict=True)]


def test_logits_without_a_best_are_told(choose: Choose) -> None:
    logits = random_logits(4, 1000)
    logits[0, 999] = np.nan
    logits[1, 3] = np.inf
    logits[2] = -np.inf
    for way in ({"temperature": 0}, {"temperature": 1.0}, {"top_p": 0.5}):
        _, best = choose(logits, [stream(way, 1000, seed) for seed in range(4)])
        assert [bool(np.isfinite(b)) for b in best] == [False, False, False, True]


def test_forbidden_tokens_are_never_drawn(choose: Choose) -> None:
    logits = np.full((40, 500), -np.inf, np.float32)
    logits[:, [13, 77]] = 1.0
    for way in ({"temperature": 1.0}, {"top_k": 10}, {"top_p": 0.999}):
        assert set(choose(logits, [stream(way, 500, seed) for seed in range(40)])[0]) == {13, 77}


def test_draws_have_the_shares_of_the_softmax(choose: Choose) -> None:
    rows, vocab = 4000, 40
    logits = np.tile(random_logits(1, vocab, scale=1.5), (rows, 1))
    tokens, _ = choose(logits, [stream({"temperature": 1.0}, vocab, seed) for seed in range(rows)])
    p = np.exp(logits[0].astype(np.float64) - logits[0].max())
    p /= p.sum()
    found = np.bincount(tokens, minlength=vocab) / rows
    assert np.abs(found - p).max() < 4 * np.sqrt(p.max() / rows)


def test_a_row_does_not_depend_on_the_others_or_on_threads(choose: Choose) -> None:
    ways = list(WAYS.values())
    logits = random_logits(len(ways), 5000)
    seqs = [stream(way, 5000, seed) for seed, way in enumerate(ways)]
    together = choose(logits, seqs)
    assert choose(logits, seqs, threads=3) == together
    alone = [choose(logits[i : i + 1], [seq]) for i, seq in enumerate(seqs)]
    assert [a[0][0] for a in alone] == together[0]


def test_rows_of_the_host_are_left_alone(choose: Choose) -> None:
    logits = random_logits(3, 300)
    ways = ({"temperature": 0}, {"logprobs": 2}, {"allowed_token_ids": (4,)})
    tokens, _ = choose(logits, [stream(way, 300, seed) for seed, way in enumerate(ways)])
    assert tokens == [int(logits[0].argmax()), -5, -5]
