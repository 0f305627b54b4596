"""Tokens chosen on the device: which rows are, what their records say, and an engine that takes what it is given."""

from __future__ import annotations

import re

import numpy as np
import pytest

from planc.codegen.cuda.aot import KERNELS
from planc.plans import sampling
from planc.runtime.choice import Choice, Recorder, SamplingExecutor, chosen, token_of, write
from planc.runtime.engine import Engine
from planc.runtime.sampler import uniform
from planc.runtime.scheduler import Chunk, SchedulerLimits
from planc.runtime.sequence import SamplingParams, Sequence
from tests.runtime.fake import FakeExecutor, hashed_logits, reference, tiny_tokenizer

VOCAB = 300
TOKENIZER = tiny_tokenizer(VOCAB)
EOS = (1, 3)


def record(tokens=(4, 5, 6), prompt_len=2, number=2, seed=0, **settings) -> np.ndarray:
    out = np.full(sampling.RECORD, -1, np.int32)
    seq = Sequence(9, list(tokens), prompt_len, SamplingParams(**settings), seed=seed)
    write(out, seq, number, EOS)
    return out


def edits(found: np.ndarray) -> list[tuple[int, float]]:
    pairs = found[sampling.LIST :].reshape(-1, 2)[: found[sampling.EDITS]]
    return [(int(token), float(added.view(np.float32))) for token, added in pairs]


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"temperature": 0}, sampling.GREEDY),
        ({"temperature": 2, "top_k": 1}, sampling.GREEDY),
        ({}, sampling.DRAWN),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 2}, sampling.DRAWN),
        ({"logprobs": 0}, sampling.HOST),
        ({"prompt_logprobs": 0}, sampling.HOST),
        ({"allowed_token_ids": (3,)}, sampling.HOST),
        ({"logit_bias": tuple((n, 1.0) for n in range(sampling.MOST_EDITS))}, sampling.DRAWN),
        ({"logit_bias": tuple((n, 1.0) for n in range(sampling.MOST_EDITS + 1))}, sampling.HOST),
        ({"logit_bias": tuple((n, 1.0) for n in range(sampling.MOST_EDITS - 1)), "min_tokens": 2}, sampling.HOST),
    ],
)
def test_where_a_row_is_chosen(settings: dict, kind: int) -> None:
    assert record(**settings)[sampling.KIND] == kind


def test_a_record_says_what_the_sampler_looks_at() -> None:
    found = record(seed=7, temperature=0.5, top_k=9, top_p=0.25, min_p=0.125, frequency_penalty=1.5)
    reals, shares = found.view(np.float32), found.view(np.uint64)
    assert found[[sampling.SEQUENCE, sampling.LENGTH, sampling.PROMPT, sampling.TOP_K]].tolist() == [2, 3, 2, 9]
    names = (sampling.REPETITION, sampling.PRESENCE, sampling.FREQUENCY, sampling.TEMPERATURE, sampling.MIN_P)
    assert [reals[n] for n in names] == [1, 0, 1.5, 0.5, 0.125]
    assert shares[sampling.TOP_P // 2] == 2**62
    assert shares[sampling.UNIFORM // 2] == int(uniform(7, 0, 3) * 2**64)
    assert record(top_k=-1, top_p=1)[[sampling.TOP_K, sampling.TOP_P, sampling.TOP_P + 1]].tolist() == [0, 0, 0]
    assert record(top_p=1e-30).view(np.uint64)[sampling.TOP_P // 2] == 1
    assert record(top_k=2**40)[sampling.TOP_K] == 2**31 - 1


def test_edits_are_biases_and_then_the_tokens_that_would_end_too_early() -> None:
    settings = {"logit_bias": ((5, 1.5), (5, -0.5)), "min_tokens": 2, "stop_token_ids": (8,)}
    assert edits(record(**settings)) == [(5, 1.5), (5, -0.5), (1, -np.inf), (3, -np.inf), (8, -np.inf)]
    assert edits(record(tokens=(4, 5, 6, 7), **settings)) == [(5, 1.5), (5, -0.5)]


def test_records_of_a_step_are_those_that_are_written_one_by_one() -> None:
    ways: list[dict] = [
        {}, {"temperature": 0}, {"temperature": 0, "presence_penalty": 0.5}, {"temperature": 0, "min_tokens": 2},
        {"temperature": 0, "logit_bias": ((4, 1.0),)}, {"temperature": 0, "logprobs": 1}, {"top_k": 1},
    ]  # fmt: skip
    seqs = [Sequence(i, list(range(3, 6 + i)), 2, SamplingParams(**way), seed=i) for i, way in enumerate(ways * 2)]
    recorder = Recorder(32, EOS)
    for order in (seqs, seqs[::-1]):  # the second finds what the first has left in its memory
        chunks = [Chunk(seq, 0, len(seq.tokens), i % 3) for i, seq in enumerate(order)]
        found, want = recorder.fill(chunks), np.full(sampling.RECORD, -1, np.int32)
        row = 0
        for number, chunk in enumerate(chunks):
            for _ in range(chunk.rows):
                write(want, chunk.seq, number, EOS)
                used = sampling.LIST + 2 * want[sampling.EDITS]
                assert found[row, :used].tolist() == want[:used].tolist()
                row += 1
        assert len(found) == row


def test_the_kernels_read_a_record_as_it_is_written() -> None:
    text = (KERNELS / "sampling.py").read_text()
    places = {name: int(at) for name, at in re.findall(r"^_([A-Z_]+) = tl\.constexpr\((\d+)\)$", text, re.MULTILINE)}
    names = [n for n in vars(sampling) if n.isupper() and n in places]
    assert len(names) == 15
    assert {n: places[n] for n in names} == {n: getattr(sampling, n) for n in names}
    assert sampling.TOP_P % 2 == sampling.UNIFORM % 2 == sampling.RECORD % 2 == 0, "shares are words of 64 bits"


def test_what_an_executor_gives_is_a_token_or_logits_a_row() -> None:
    records = np.zeros((3, sampling.RECORD), np.int32)
    records[[0, 2], sampling.KIND] = sampling.GREEDY
    found = np.array([[5, np.float32(2.5).view(np.int32)], [0, 0], [6, np.float32(np.nan).view(np.int32)]], np.int32)
    logits = np.arange(12, dtype=np.float32).reshape(3, 4)
    first, second, third = chosen(records, found, logits)
    assert first == Choice(5, 2.5)
    np.testing.assert_array_equal(second, logits[1])
    seq = Sequence(0, [1, 2], 1, SamplingParams())
    assert token_of(first, seq) == 5
    with pytest.raises(ValueError, match=r"logits at position 2 are not finite \(best is nan\)"):
        token_of(third, seq)


class Device(FakeExecutor):
    """Chooses greedy rows itself, and gives no logits of theirs."""

    samples = True
    rows_by_kind = (0, 0, 0)

    def sample_step(self, batch, records):
        logits = self.step(batch)
        kinds = records[:, sampling.KIND]
        self.rows_by_kind = tuple(a + int((kinds == kind).sum()) for kind, a in enumerate(self.rows_by_kind))
        assert (
            records[kinds != sampling.HOST, sampling.LENGTH] == batch.positions[batch.logit_rows][kinds != 0] + 1
        ).all()
        found = np.stack([logits.argmax(-1).astype(np.int32), logits.max(-1).view(np.int32)], -1)
        found[kinds == sampling.HOST] = -1
        logits[kinds != sampling.HOST] = np.nan
        return found, logits


def engine(executor, **limits) -> Engine:
    return Engine(
        executor,
        TOKENIZER,
        SchedulerLimits(**({"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16} | limits)),
    )


def test_an_engine_takes_tokens_from_the_device_and_logits_where_they_are_wanted() -> None:
    device = Device(num_blocks=20, vocab_size=VOCAB)
    assert isinstance(device, SamplingExecutor)
    prompts = [list(range(n, n + 12)) for n in range(6)]
    asked = [SamplingParams(max_tokens=9, temperature=0, logprobs=1 if n % 2 else None) for n in range(6)]
    outputs = engine(device).generate(prompts, asked)
    for prompt, params, output in zip(prompts, asked, outputs, strict=True):
        assert list(output.token_ids) == reference(prompt, 9, hashed_logits(VOCAB))
        assert len(output.logprobs or ()) == (9 if params.logprobs else 0)
    assert device.rows_by_kind == (27, 27, 0)


def test_scored_prompts_beside_rows_that_the_device_chooses() -> None:
    prompts = [list(range(n, n + 12)) for n in range(4)]
    asked = [SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=0 if n % 2 else None) for n in range(4)]
    outputs = engine(Device(vocab_size=VOCAB)).generate(prompts, asked)
    for prompt, params, output in zip(prompts, asked, outputs, strict=True):
        assert list(output.token_ids) == reference(prompt, 3, hashed_logits(VOCAB))
        assert len(output.prompt_logprobs) == (11 if params.prompt_logprobs is not None else 0)


def test_a_step_that_fails_and_logits_that_are_no_numbers_end_their_sequence_alone() -> None:
    def logits(history):
        return np.full(VOCAB, np.nan, np.float32) if history[0] == 9 else hashed_logits(VOCAB)(history)

    def refuse(batch) -> None:
        if 77 in batch.ids:
            raise RuntimeError("a broken token")

    device = Device(vocab_size=VOCAB, logits=logits, before=refuse)
    outputs = engine(device).generate([[5, 6], [9, 6], [7, 77], [8, 6]], SamplingParams(max_tokens=4, temperature=0))
    assert [o.finish_reason for o in outputs] == ["length", "error", "error", "length"]
    assert outputs[1].error == "sampling failed: logits at position 2 are not finite (best is nan)"
    assert "a broken token" in (outputs[2].error or "")
    assert list(outputs[3].token_ids) == reference([8, 6], 4, hashed_logits(VOCAB))
