"""The engine over a fake model that reads its history through the pages: same tokens however they are computed."""

import random
import threading
import time

import numpy as np
import pytest

from planc.runtime.engine import Engine, Observer
from planc.runtime.errors import RequestError
from planc.runtime.sampler import logprobs_of
from planc.runtime.scheduler import SchedulerLimits
from planc.runtime.sequence import SamplingParams
from tests.runtime.fake import FakeExecutor, echo_logits, hashed_logits, reference, tiny_tokenizer

VOCAB = 300
TOKENIZER = tiny_tokenizer(VOCAB)


def engine(executor=None, *, model_len=64, seqs=8, tokens=32, **settings):
    executor = executor or FakeExecutor(vocab_size=VOCAB)
    return Engine(executor, TOKENIZER, SchedulerLimits(model_len, seqs, tokens), **settings)


def greedy(count=8, **settings):
    return SamplingParams(max_tokens=count, temperature=0, **settings)


def prompts_of(rng, count, shared=()):
    return [[*shared, *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 24)))] for _ in range(count)]


@pytest.mark.parametrize("chunk", [1, 3, 16, 512])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("blocks", [16, 17, 300])
def test_same_tokens_batched_chunked_cached_preempted(chunk, caching, blocks):
    """16 blocks of 4 tokens hold one full sequence, so that sixteen of them preempt each other; 300 hold them all."""
    rng = random.Random(chunk)
    prompts = prompts_of(rng, 8) + prompts_of(rng, 8, shared=range(10))
    e = engine(FakeExecutor(blocks, 4, VOCAB), tokens=chunk, seqs=16, prefix_caching=caching)
    outputs = e.generate(prompts, greedy(30))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == reference(prompt, 30, hashed_logits(VOCAB))
        assert output.finish_reason == "length"
    if chunk >= 16:
        assert (e.scheduler.preemptions > 0) == (blocks < 300)
        assert (e.scheduler.prefix_hits > 0) == caching
    assert e.pool.num_used == 0


@pytest.mark.parametrize("chunk", [1, 5, 512])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("blocks", [16, 300])
def test_prompts_are_scored_however_they_are_cut(chunk, caching, blocks):
    """Scored prompts beside others; 16 blocks make them preempt each other in the middle."""
    rng = random.Random(chunk)
    logits = hashed_logits(VOCAB)
    prompts = prompts_of(rng, 10, shared=range(6))
    e = engine(FakeExecutor(blocks, 4, VOCAB), tokens=chunk, seqs=5, prefix_caching=caching)
    asked = [greedy(30 if i % 3 else 1, prompt_logprobs=2 if i % 2 else None) for i in range(10)]
    outputs = e.generate(prompts, asked)
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert list(output.token_ids) == reference(prompt, asked[i].max_tokens, logits)
        rows = range(1, len(prompt)) if i % 2 else ()
        want = [logprobs_of(logits(np.array(prompt[:at])), prompt[at], 2) for at in rows]
        assert list(output.prompt_logprobs) == want
    assert e.pool.num_used == 0


def test_a_prompt_alone_is_scored_up_to_the_whole_context():
    prompt = [i % VOCAB for i in range(64)]
    (output,) = engine().generate([prompt], greedy(0, prompt_logprobs=0))
    assert (len(output.prompt_logprobs), output.token_ids, output.finish_reason) == (63, (), "length")
    assert (output.prompt_tokens, output.completion_tokens) == (64, 0)
    with pytest.raises(RequestError, match="max_tokens is 0"):
        greedy(0)


def test_a_prompt_whose_logits_are_not_finite_fails_alone():
    def logits(history):
        return np.full(VOCAB, np.nan, np.float32) if 7 in history else hashed_logits(VOCAB)(history)

    bad, good = engine(FakeExecutor(vocab_size=VOCAB, logits=logits)).generate(
        [[1, 7, 2, 3, 4], [1, 2, 3]], greedy(2, prompt_logprobs=0)
    )
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert "not finite" in bad.error


def test_fake_model_notices_a_wrong_page():
    """The oracle itself: if pages were mixed up, tokens would change."""
    e = engine(tokens=4)
    outputs = []
    prompt = list(range(20))
    e.submit(prompt, greedy(8), outputs.append)
    e._take_commands(wait=False)
    e.step()
    e.step()
    seq = e.scheduler.running[0]
    seq.pages[0], seq.pages[1] = seq.pages[1], seq.pages[0]
    while e.scheduler.has_work:
        e.step()
    tokens = [token for output in outputs for token in output.token_ids]
    assert tokens != reference(prompt, 8, hashed_logits(VOCAB))


def test_sampling_does_not_depend_on_company():
    params = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, seed=7)
    prompt = [5, 6, 7, 8, 9]
    alone = engine().generate([prompt], params)[0].token_ids
    others = [SamplingParams(max_tokens=12, seed=i) for i in range(1, 8)]
    crowd = engine(FakeExecutor(18, 4, VOCAB), seqs=16).generate(
        [*[[i] * 9 for i in range(7)], prompt], [*others, params]
    )
    assert crowd[-1].token_ids == alone
    again = engine().generate([prompt], SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, seed=8))
    assert again[0].token_ids != alone


def test_no_seed_means_a_new_one_each_time_unless_the_engine_has_its_own():
    params = SamplingParams(max_tokens=10)
    first, second = engine().generate([[1], [1]], params)
    assert first.token_ids != second.token_ids
    seeded = [engine(seed=3).generate([[1], [1]], params) for _ in range(2)]
    assert seeded[0] == seeded[1]


def test_samples_of_one_seed_differ():
    e, outputs = engine(), [[], []]
    params = SamplingParams(max_tokens=10, seed=1)
    for sample in range(2):
        e.submit([4, 5], params, outputs[sample].append, sample=sample)
    e._take_commands(wait=False)
    while e.scheduler.has_work:
        e.step()
    first, second = ([t for o in out for t in o.token_ids] for out in outputs)
    assert first != second


def eos_after(count, eos):
    """Echoes token 65, and eos as its `count`-th token."""

    def logits(history):
        out = np.zeros(VOCAB, np.float32)
        out[65] = 5
        out[eos] = 9 if len(history) >= count else 0
        return out

    return logits


@pytest.mark.parametrize("eos", [1, 3])
def test_every_eos_stops_and_counts_but_is_not_shown(eos):
    e = engine(FakeExecutor(vocab_size=VOCAB, logits=eos_after(5, eos)), eos_token_ids=(1, 3))
    (output,) = e.generate([[9, 9]], greedy(20, skip_special_tokens=False))
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.token_ids == (65, 65, 65, eos)
    assert output.completion_tokens == 4
    assert output.text == TOKENIZER.decode([65] * 3)


def test_ignore_eos_and_min_tokens():
    e = engine(FakeExecutor(vocab_size=VOCAB, logits=eos_after(5, 1)), eos_token_ids=(1, 3))
    ignoring, minimum, stop_id = e.generate(
        [[9, 9]] * 3, [greedy(9, ignore_eos=True), greedy(9, min_tokens=7), greedy(9, stop_token_ids=(65,))]
    )
    assert ignoring.token_ids == (65, 65, 65, *[1] * 6)
    assert ignoring.finish_reason == "length"
    assert minimum.token_ids == (*[65] * 7, 1)
    assert (stop_id.token_ids, stop_id.stop_reason, stop_id.text) == ((65,), 65, "")


def test_stop_string_cuts_the_text():
    prompt = TOKENIZER.encode("the quick brown fox jumps ", add_special_tokens=False)
    text_of = lambda **kw: engine(FakeExecutor(vocab_size=VOCAB, logits=echo_logits(VOCAB, len(prompt)))).generate(  # noqa: E731
        [prompt], greedy(30, **kw)
    )[0]
    whole = text_of().text
    assert whole.startswith("the quick brown fox jumps the quick")
    for stop in ("own fox", "k b", "jumps the"):
        output = text_of(stop=(stop, "never"))
        assert output.text == whole[: whole.index(stop)]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert text_of(stop=(stop,), include_stop_str_in_output=True).text == output.text + stop
    assert len(text_of(stop=("quick",), min_tokens=12).token_ids) >= 12


@pytest.mark.parametrize("stop", [(), ("客x", "own foxes")])
def test_text_held_back_is_shown_when_the_length_ends_it(stop):
    """Inside a character, and inside what could have become a stop string."""
    prompt = TOKENIZER.encode("龘客 brown fox", add_special_tokens=False)
    for count in range(1, 2 * len(prompt)):
        e = engine(FakeExecutor(vocab_size=VOCAB, logits=echo_logits(VOCAB, len(prompt))))
        (output,) = e.generate([prompt], greedy(count, stop=stop))
        assert output.text == TOKENIZER.decode(output.token_ids)
        assert len(output.token_ids) == count


def test_logprobs_are_of_the_raw_distribution():
    e = engine()
    (output,) = e.generate([[1, 2, 3]], SamplingParams(max_tokens=3, temperature=0.5, logprobs=4, seed=0))
    history = [1, 2, 3]
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        logits = hashed_logits(VOCAB)(np.array(history, np.int64)).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum())
        assert entry.token == token
        assert entry.logprob == pytest.approx(logprobs[token], abs=1e-5)
        assert [t for t, _ in entry.top] == np.argsort(-logprobs, kind="stable")[:4].tolist()
        assert [v for _, v in entry.top] == pytest.approx(np.sort(logprobs)[::-1][:4], abs=1e-5)
        history.append(token)


@pytest.mark.parametrize(
    ("prompt", "params", "match"),
    [
        ([], greedy(), "empty"),
        ([VOCAB], greedy(), f"token id {VOCAB} is outside"),
        ([-1], greedy(), "token id -1 is outside"),
        ([1] * 57, greedy(8), "57 in the prompt and 8 to generate"),
        ([1] * 64, SamplingParams(max_tokens=None), "64 in the prompt"),
        ([1], greedy(logit_bias=((VOCAB, 1.0),)), "logit_bias"),
        ([1], greedy(stop_token_ids=(VOCAB,)), "stop_token_ids"),
        ([1], greedy(allowed_token_ids=(1, 2000)), "allowed_token_ids"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_before_queueing(prompt, params, match):
    e = engine()
    with pytest.raises(RequestError, match=match):
        e.submit(prompt, params, pytest.fail)
    assert not e.scheduler.has_work
    assert e._inbox.empty()


def test_context_edges():
    e = engine(model_len=64)
    assert e.generate([[1] * 56], greedy(8))[0].completion_tokens == 8
    assert e.generate([[1] * 63], SamplingParams(max_tokens=None, ignore_eos=True))[0].completion_tokens == 1
    small = engine(FakeExecutor(4, 4, VOCAB), model_len=64)
    assert small.limits.max_model_len == 16
    assert small.generate([[1]], SamplingParams(max_tokens=None))[0].completion_tokens == 15


def test_abort_frees_pages_by_the_next_step():
    e, outputs = engine(), []
    seq = e.submit([1] * 9, greedy(50), outputs.append)
    e._take_commands(wait=False)
    e.step()
    assert e.pool.num_used > 0
    e.abort(seq)
    e._take_commands(wait=False)
    assert e.pool.num_used == 0
    assert outputs[-1].finish_reason == "abort"
    e.abort(seq)
    e._take_commands(wait=False)
    assert len([o for o in outputs if o.finish_reason]) == 1


def test_nan_logits_end_one_request_only():
    def logits(history):
        out = hashed_logits(VOCAB)(history)
        if history[0] == 99 and len(history) > 4:
            out[7] = np.nan
        return out

    e = engine(FakeExecutor(vocab_size=VOCAB, logits=logits))
    good, bad = e.generate([[1, 2], [99, 2]], greedy(10))
    assert bad.finish_reason == "error"
    assert "not finite" in bad.error
    assert list(good.token_ids) == reference([1, 2], 10, hashed_logits(VOCAB))


@pytest.mark.parametrize("shared", [(), tuple(range(12))])
def test_a_step_that_fails_costs_only_the_culprit(shared):
    def poison(batch):
        if 299 in batch.ids:
            raise RuntimeError("boom")

    rng = random.Random(2)
    prompts = [[*shared, *(rng.randrange(290) for _ in range(5))] for _ in range(6)]
    prompts[2] = [*prompts[2][:-1], 299]
    e = engine(FakeExecutor(before=poison, vocab_size=VOCAB), tokens=200)
    outputs = e.generate(prompts, greedy(10))
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if number == 2:
            assert output.finish_reason == "error"
            assert "boom" in output.error
        else:
            assert list(output.token_ids) == reference(prompt, 10, hashed_logits(VOCAB))
    assert e.healthy()


def test_pages_of_a_failed_prefill_are_not_trusted():
    """The culprit comes first and would have computed the prefix that all others count on."""

    def poison(batch):
        if 299 in batch.ids:
            raise RuntimeError("boom")

    shared = list(range(16))
    prompts = [[*shared, 299], [*shared, 5], [*shared, 6]]
    e = engine(FakeExecutor(before=poison, vocab_size=VOCAB), tokens=200)
    outputs = e.generate(prompts, greedy(6))
    assert outputs[0].finish_reason == "error"
    for prompt, output in zip(prompts[1:], outputs[1:], strict=True):
        assert list(output.token_ids) == reference(prompt, 6, hashed_logits(VOCAB))


def test_blocks_of_a_sequence_that_waits_for_a_failed_one_are_not_trusted():
    """It shares the culprit's prefix, so it is preempted; its own blocks were scheduled, but never computed."""

    def poison(batch):
        if 299 in batch.ids:
            raise RuntimeError("boom")

    shared = list(range(4))
    waits = [*shared, *range(50, 63)]
    alike = [*waits[:13], 7, 8, 9]
    e = engine(FakeExecutor(before=poison, vocab_size=VOCAB), tokens=200)
    outputs = e.generate([[*shared, 299], waits], greedy(6))
    assert [o.finish_reason for o in outputs] == ["error", "length"]
    for prompt, output in zip([waits, waits, alike], [outputs[1], *e.generate([waits, alike], greedy(6))], strict=True):
        assert list(output.token_ids) == reference(prompt, 6, hashed_logits(VOCAB))
    e.scheduler.check_integrity()


def test_a_prompt_far_too_long_is_refused_by_its_length_alone():
    class Prompt(list):
        def __iter__(self):
            raise AssertionError("its ids were looked at")

    with pytest.raises(RequestError, match="65 in the prompt"):
        engine(model_len=64).resolve(Prompt([VOCAB] * 65), greedy())


def test_the_idle_check_of_a_large_cache_takes_no_time_and_notices_a_leak():
    started = time.perf_counter()
    e = engine(FakeExecutor(2**19, 1, VOCAB))
    e.generate([[1]], greedy(1))
    assert time.perf_counter() - started < 0.5
    started = time.perf_counter()
    for _ in range(1000):
        e.scheduler.check_idle()
    assert time.perf_counter() - started < 0.1
    e.pool.allocate(1)
    with pytest.raises(RuntimeError, match="1 pages are held"):
        e.scheduler.check_idle()


def test_a_model_that_always_fails_makes_the_engine_unhealthy():
    def fail(batch):
        raise RuntimeError("broken")

    e = engine(FakeExecutor(before=fail, vocab_size=VOCAB))
    for _ in range(3):
        assert e.generate([[1]], greedy())[0].finish_reason == "error"
    assert not e.healthy()


class Collector:
    """A sink that can be waited for."""

    def __init__(self):
        self.outputs, self.done = [], threading.Event()

    def __call__(self, output):
        self.outputs.append(output)
        if output.finish_reason:
            self.done.set()

    def tokens(self):
        return [token for output in self.outputs for token in output.token_ids]


def test_thread_serves_submissions_from_many_threads_and_sleeps_when_idle():
    e = engine(FakeExecutor(40, 4, VOCAB), seqs=8)
    e.start()
    sinks = [Collector() for _ in range(40)]

    def client(part):
        for i in range(part, 40, 4):
            e.submit([i + 2] * (i % 7 + 1), greedy(12), sinks[i])

    threads = [threading.Thread(target=client, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for i, sink in enumerate(sinks):
        assert sink.done.wait(20)
        assert sink.tokens() == reference([i + 2] * (i % 7 + 1), 12, hashed_logits(VOCAB))
    steps, cpu = e.executor.steps, time.process_time()
    time.sleep(0.3)
    assert e.executor.steps == steps
    assert time.process_time() - cpu < 0.1
    e.close()
    assert e.pool.num_used == 0
    assert e.executor.closed
    with pytest.raises(RequestError) as refused:
        e.submit([1], greedy(), pytest.fail)
    assert refused.value.status == 503


def test_close_ends_what_is_left():
    e, sink = engine(FakeExecutor(vocab_size=VOCAB, step_seconds=0.01)), Collector()
    e.start()
    e.submit([1], greedy(60), sink)
    e.close()
    assert sink.done.wait(5)
    assert sink.outputs[-1].finish_reason == "abort"


def test_a_bug_in_the_engine_fails_requests_instead_of_hanging_them():
    class Broken(Observer):
        def stepped(self, chunks, now):
            raise ZeroDivisionError("bug")

    e, sink = engine(observer=Broken()), Collector()
    e.start()
    e.submit([1], greedy(), sink)
    assert sink.done.wait(5)
    assert sink.outputs[-1].finish_reason == "error"
    assert not e.healthy()
    with pytest.raises(RequestError):
        e.submit([1], greedy(), pytest.fail)
    e.close()


def test_a_sink_that_raises_ends_its_own_sequence_only():
    e, outputs = engine(), []

    def sink(output):
        raise ConnectionError("gone")

    e.submit([1, 2], greedy(10), sink)
    e.submit([3, 4], greedy(10), outputs.append)
    e._take_commands(wait=False)
    while e.scheduler.has_work:
        e.step()
    assert [t for o in outputs for t in o.token_ids] == reference([3, 4], 10, hashed_logits(VOCAB))
    assert e.pool.num_used == 0


def test_watchdog_sees_a_step_that_hangs():
    release = threading.Event()
    e, sink = engine(FakeExecutor(before=lambda batch: release.wait(5), vocab_size=VOCAB)), Collector()
    e.start()
    assert e.healthy(0.0)
    e.submit([1], greedy(1), sink)
    time.sleep(0.15)
    assert not e.healthy(0.1)
    release.set()
    assert sink.done.wait(5)
    time.sleep(0.05)
    assert e.healthy(0.1)
    e.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_load_with_aborts(seed):
    """Random arrivals, aborts, chunk sizes and pools: whoever finishes has its own tokens; all pages come back."""
    rng = random.Random(seed)
    size = rng.choice([1, 4, 16])
    e = engine(
        FakeExecutor(-(-64 // size) + rng.randrange(12), size, VOCAB),
        seqs=rng.choice([2, 6, 12]),
        tokens=rng.choice([12, 40]),
        prefix_caching=rng.random() < 0.7,
    )
    alive, done = {}, 0
    for i in range(100):
        prompt = [*range(rng.choice([0, 9, 17])), *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12)))]
        count, outputs = rng.randrange(1, 30), []
        alive[e.submit(prompt, greedy(count), outputs.append)] = (prompt, count, outputs)
        if rng.random() < 0.1:
            e.abort(rng.choice(list(alive)))
        for _ in range(rng.randrange(4)):
            e._take_commands(wait=False)
            if e.scheduler.has_work:
                e.step()
        if i % 10 == 0:
            e.scheduler.check_integrity()
    while e.scheduler.has_work:
        e._take_commands(wait=False)
        e.step()
    for prompt, count, outputs in alive.values():
        tokens = [token for output in outputs for token in output.token_ids]
        expected = reference(prompt, count, hashed_logits(VOCAB))
        if outputs[-1].finish_reason == "length":
            assert tokens == expected
            done += 1
        else:
            assert outputs[-1].finish_reason == "abort"
            assert tokens == expected[: len(tokens)]
    assert done > 60
    e.scheduler.check_integrity()
    assert e.pool.num_used == 0
