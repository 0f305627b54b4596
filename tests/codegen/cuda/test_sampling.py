"""Token choice on the device: the tokens of the host's sampler, in the interpreter and as compiled, row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from planc.codegen.cuda import aot
from planc.codegen.cuda.aot import KERNELS
from planc.codegen.cuda.call import Bucket, Call
from planc.codegen.cuda.sampling import Sampling
from planc.emulator import interpreter
from planc.emulator.run import run_kernel
from planc.plans.launches import KV
from planc.plans.sampling import RECORD, RECORDS, SAMPLED
from planc.runtime.choice import write
from planc.runtime.sampler import sample
from planc.runtime.sequence import SamplingParams
from planc.runtime.sequence import Sequence as Stream
from tests.runtime.test_sampler import check_distribution, softmax

Array = np.ndarray
Runner = Callable[[Call, Mapping[str, Array]], None]
BLOCK = 16
KEYS_AND_VALUES = 32  # words of a page before its ids
EOS = (0,)
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.3, "frequency_penalty": 0.17}
WAYS: tuple[dict, ...] = (
    {"temperature": 0},
    {"temperature": 0, **PENALTIES},
    {"temperature": 0.8},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.95, **PENALTIES},
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"temperature": 0, "logit_bias": ((0, 3.0), (1, -2.0), (0, 0.1)), "min_tokens": 100, "max_tokens": 200},
    {"temperature": 1.5, "top_k": 100_000, "top_p": 0.5, "min_p": 0.01, "presence_penalty": 1.9},
    {"top_p": 0.999},
    {"temperature": 50.0, "top_p": 0.5},
    {"top_k": 700, "frequency_penalty": -0.5},
)
QUICK = (1, 3, 5, 6)  # of the ways: between them every kernel's branches


def interpreted(call: Call, data: Mapping[str, Array]) -> None:
    k = call.kernel
    args = [data[str(r.value)].ctypes.data + r.offset if r.kind in ("value", "scratch") else r.value for r in call.args]
    memory = interpreter.Memory.of([(b.ctypes.data, b.nbytes) for b in data.values()])
    values = dict(zip(k.signature, args, strict=True))
    interpreter.launch(KERNELS / f"{k.source}.py", k.function, k.signature, k.constants, call.grid, values, memory)


def compiled(folder: Path, sm: int) -> Runner:
    def launch(call: Call, data: Mapping[str, Array]) -> None:
        (binary,) = aot.compile([call.kernel], sm, folder / str(sm))
        flat = {n: a.reshape(-1) for n, a in data.items()}
        args = [flat[r.value][r.offset // 4 :] if isinstance(r.value, str) else r.value for r in call.args]
        text = (folder / str(sm) / f"{binary.name}.ptx").read_text()
        run_kernel(text, call.grid, args, binary.shared)  # type: ignore[arg-type]

    return launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sampling")


def stream(rng: np.random.Generator, vocab: int, way: dict, seed: int) -> Stream:
    count = int(rng.integers(1, 60))
    tokens = rng.integers(0, min(vocab, 40), count).tolist()  # few, so that some come often
    params = SamplingParams(**({"max_tokens": 10} | way))
    return Stream(seed, tokens, int(rng.integers(1, count + 1)), params, seed=seed)


def run(logits: Array, seqs: Sequence[Stream], runner: Runner, padding: int = 1) -> tuple[list[int], Array]:
    """Of each row the token and the best logit; rows of padding must stay as they are."""
    rows, vocab = len(seqs) + padding, logits.shape[1]
    width = -(-max(len(s.tokens) for s in seqs) // BLOCK)
    table = np.random.default_rng(0).permutation(rows * width).astype(np.int32).reshape(rows, width)
    page = KEYS_AND_VALUES + BLOCK
    made = Sampling("logits", vocab, page * 4, BLOCK, width, wide=False)
    records = np.zeros((rows, RECORD), np.int32)
    for number, seq in enumerate(seqs):
        write(records[number], seq, number, EOS)
    ids = np.array([t for s in seqs for t in s.tokens] + [7], np.int32)
    slots = [table[n, p // BLOCK] * BLOCK + p % BLOCK for n, s in enumerate(seqs) for p in range(len(s.tokens))] + [-1]
    data = {"ids": ids, "slots": np.array(slots, np.int32), "page_table": table, RECORDS: records}
    data |= {KV: np.full((table.size, page), 0x7FFFFFFF, np.int32), SAMPLED: np.full((rows, 2), -7, np.int32)}
    data["logits"] = np.concatenate([logits, np.full((padding, vocab), np.nan, np.float32)])
    calls = made.calls(Bucket(len(ids), rows, rows))
    data |= {n: np.full(size // 4, 0x7FC00000, np.int32) for c in calls for n, size in c.scratch.items()}
    for call in calls:
        runner(call, data)
    assert (data[SAMPLED][len(seqs) :] == -7).all()
    assert (data[KV][:, :KEYS_AND_VALUES] == 0x7FFFFFFF).all()
    return data[SAMPLED][: len(seqs), 0].tolist(), data[SAMPLED].view(np.float32)[: len(seqs), 1]


def on_host(logits: Array, seqs: Sequence[Stream]) -> list[int]:
    return [sample(row, seq, EOS) for row, seq in zip(logits, seqs, strict=True)]


def normal(rng: np.random.Generator, rows: int, vocab: int) -> Array:
    return (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)


@pytest.mark.parametrize("vocab", [1, 100, 257, pytest.param(50257, marks=pytest.mark.slow)])
def test_interpreted(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    seqs = [stream(rng, vocab, WAYS[way], way) for way in QUICK]
    logits = normal(rng, len(seqs), vocab)
    assert run(logits, seqs, interpreted)[0] == on_host(logits, seqs)


@pytest.mark.parametrize(
    ("sm", "vocab", "rows"),
    [
        (90, 4500, 12),
        *(pytest.param(sm, 50257, 24, marks=pytest.mark.slow) for sm in (80, 89, 90, 100, 120)),
        *(pytest.param(sm, 257, 600, marks=pytest.mark.slow) for sm in (80, 90)),
    ],
)
def test_compiled(sm: int, vocab: int, rows: int, folder: Path) -> None:
    """4500 tokens are more groups than are looked at first, and the last is not whole."""
    rng = np.random.default_rng(rows)
    seqs = [stream(rng, vocab, WAYS[n % len(WAYS)], n) for n in range(rows)]
    logits = normal(rng, rows, vocab)
    got, want = run(logits, seqs, compiled(folder, sm))[0], on_host(logits, seqs)
    certain = [n for n, s in enumerate(seqs) if s.params.greedy]
    assert [got[n] for n in certain] == [want[n] for n in certain]
    assert sum(a != b for a, b in zip(got, want, strict=True)) <= rows // 1000, "uniform numbers at a boundary are rare"


DRAWN = {"top_k": 9, "top_p": 0.9}
MORE_DRAWN = [{"temperature": 0.7}, {"min_p": 0.1, "top_p": 0.8}, {"top_k": 30}]


@pytest.mark.parametrize(
    ("way", "rows"), [(DRAWN, 100), *(pytest.param(way, 500, marks=pytest.mark.slow) for way in (DRAWN, *MORE_DRAWN))]
)
def test_drawn_tokens_have_the_right_distribution(way: dict, rows: int, folder: Path) -> None:
    vocab = 257
    logits = normal(np.random.default_rng(1), 1, vocab).repeat(rows, 0)
    seqs = [Stream(n, [5], 1, SamplingParams(**way), seed=1000 + n) for n in range(rows)]
    p = softmax(logits[0] / np.float32(way.get("temperature", 1.0)))
    p[p < way.get("min_p", 0) * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    kept = order[: way.get("top_k", vocab)]
    share = p[kept].cumsum() / p[kept].sum()
    kept = kept[: int((share < way.get("top_p", 1.0)).sum()) + 1]
    expected = np.where(np.isin(np.arange(vocab), kept), p, 0)
    check_distribution(np.array(run(logits, seqs, compiled(folder, 90))[0]), expected / expected.sum())


def test_a_row_is_chosen_alike_alone_and_beside_others_wherever_it_lies(folder: Path) -> None:
    rng = np.random.default_rng(3)
    seqs = [stream(rng, 257, WAYS[n], n) for n in range(len(WAYS))]
    logits = normal(rng, len(seqs), 257)
    together, best = run(logits, seqs, compiled(folder, 90))
    order = rng.permutation(len(seqs))
    again, best_again = run(logits[order], [seqs[n] for n in order], compiled(folder, 90), padding=4)
    assert again == [together[n] for n in order]
    np.testing.assert_array_equal(best_again, best[order])
    for n in (3, 8):
        assert run(logits[n : n + 1], seqs[n : n + 1], compiled(folder, 90), padding=0)[0] == [together[n]]


def test_ties_go_to_the_first_and_what_cannot_be_chosen_is_told(folder: Path) -> None:
    logits = np.zeros((7, 257), np.float32)
    logits[0, [9, 200]] = 4
    logits[1] = -np.inf
    logits[2, 130] = np.nan
    logits[3, 130] = np.inf
    logits[4, 1:] = -np.inf
    logits[5, 0] = -0.0
    asked = [{"temperature": 0}, {}, {"top_k": 3}, {"temperature": 0}, {"top_p": 0.5}, {"temperature": 0}, {"top_k": 4}]
    seqs = [Stream(n, [3], 1, SamplingParams(**way), seed=n) for n, way in enumerate(asked)]
    tokens, best = run(logits, seqs, compiled(folder, 90))
    assert (tokens[0], tokens[4], tokens[5]) == (9, 0, 0)
    assert tokens[6] in (0, 1, 2, 3)
    np.testing.assert_array_equal(best, np.array([4, -np.inf, np.nan, np.inf, 0, 0, 0], np.float32))


def test_history_is_that_of_the_pages_whoever_wrote_them(folder: Path) -> None:
    """Ids beyond a sequence's length, or on other pages, count for nothing: the same logits, one history apart."""
    logits = np.zeros((2, 257), np.float32)
    logits[:, [20, 21]] = [2.0, 1.9]
    seqs = [Stream(0, [20] * 33, 33, SamplingParams(temperature=0, repetition_penalty=1.5))]
    seqs += [Stream(1, [19] * 18 + [22], 3, SamplingParams(temperature=0, repetition_penalty=1.5))]
    assert run(logits, seqs, compiled(folder, 90))[0] == [21, 20]
