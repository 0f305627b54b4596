"""The scheduler by itself: limits and order at every step, no starvation, refusals, the books."""

import random

import pytest

from planc.runtime.errors import RequestError
from planc.runtime.kv import BlockPool
from planc.runtime.scheduler import Scheduler, SchedulerLimits
from planc.runtime.sequence import SamplingParams, Sequence, Status


def scheduler(blocks=32, size=4, model_len=64, seqs=8, tokens=16, caching=True):
    return Scheduler(SchedulerLimits(model_len, seqs, tokens), BlockPool(blocks, size), prefix_caching=caching)


def sequence(number, prompt, max_tokens=8, scored=False):
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=0 if scored else None)
    return Sequence(number, list(prompt), len(prompt), params)


def run_step(sched, rng, log=None):
    """Schedule, check what must hold of any step, append a token where logits were wanted.

    `log` gets the step as (sequence, tokens, rows of logits) each.
    """
    chunks = sched.schedule()
    assert sum(c.count for c in chunks) <= sched.limits.max_num_batched_tokens
    assert len(chunks) <= sched.limits.max_num_seqs
    assert len({c.seq.id for c in chunks}) == len(chunks)
    assert [s.id for s in sched.running] == sorted(s.id for s in sched.running)
    assert [s.id for s in sched.waiting] == sorted(s.id for s in sched.waiting)
    for chunk in chunks:
        assert chunk.seq.status is Status.RUNNING
        assert chunk.count > 0
        assert chunk.start == chunk.seq.computed
        assert len(chunk.seq.pages) == sched.pool.blocks_for(len(chunk.seq.tokens))
    if log is not None:
        log.append([(c.seq.id, c.count, c.rows) for c in chunks])
    assert sum(c.rows for c in chunks) <= sched.limits.max_num_seqs
    sched.check_integrity()
    finished = []
    for chunk in chunks:
        wanted, rows = chunk.end == len(chunk.seq.tokens), chunk.rows
        assert rows or not wanted
        sched.advance(chunk)
        chunk.seq.scored += rows - 1 if wanted else rows
        if wanted:
            chunk.seq.tokens.append(rng.randrange(3))
            if chunk.seq.output_len >= chunk.seq.params.max_tokens:
                sched.finish(chunk.seq)
                finished.append(chunk.seq)
    sched.check_integrity()
    return chunks, finished


def test_decodes_go_first_and_prefill_fills_the_rest():
    sched, rng = scheduler(tokens=8), random.Random(0)
    sched.add(sequence(0, [1] * 4, max_tokens=20))
    run_step(sched, rng)
    sched.add(sequence(1, [2] * 20, max_tokens=4))
    for taken in (7, 7, 6):
        chunks, _ = run_step(sched, rng)
        assert [(c.seq.id, c.count) for c in chunks] == [(0, 1), (1, taken)]
    chunks, _ = run_step(sched, rng)
    assert [(c.seq.id, c.count) for c in chunks] == [(0, 1), (1, 1)]


def test_a_scored_prompt_takes_no_more_rows_than_decodes_leave():
    sched, rng = scheduler(seqs=4), random.Random(0)
    sched.add(sequence(0, [1], max_tokens=20))
    run_step(sched, rng)
    sched.add(sequence(1, [2] * 7, max_tokens=4, scored=True))
    sched.add(sequence(2, [3] * 5, max_tokens=4))
    taken = []
    for _ in range(3):
        run_step(sched, rng, taken)
    # Without a row left, the third sequence is not admitted; the first two steps score three tokens each.
    assert taken == [[(0, 1, 1), (1, 3, 3)], [(0, 1, 1), (1, 3, 3)], [(0, 1, 1), (1, 1, 1), (2, 5, 1)]]


def test_a_prompt_that_is_scored_takes_nothing_from_the_prefix_cache():
    sched, rng, taken = scheduler(tokens=32, seqs=16), random.Random(0), []
    for number, scored in ((0, False), (1, True), (2, False)):
        sched.add(sequence(number, range(13), max_tokens=1, scored=scored))
        run_step(sched, rng, taken)
    assert taken == [[(0, 13, 1)], [(1, 13, 13)], [(2, 1, 1)]]


def test_decode_overtakes_an_older_prefill_in_the_step_but_starves_it_not():
    sched, rng = scheduler(tokens=4, model_len=128, blocks=64), random.Random(0)
    sched.add(sequence(0, range(40)))
    sched.add(sequence(1, [7]))
    seen = [[(c.seq.id, c.count) for c in run_step(sched, rng)[0]] for _ in range(14)]
    assert seen[0] == [(0, 4)]
    assert all(step[-1][0] in (0, 1) for step in seen)
    assert sum(count for step in seen for number, count in step if number == 0) >= 40


def test_prefix_hit_leaves_the_last_token_to_compute():
    sched, rng = scheduler(), random.Random(0)
    prompt = list(range(16))
    sched.add(sequence(0, prompt, max_tokens=1))
    run_step(sched, rng)
    sched.add(sequence(1, prompt, max_tokens=1))
    sched.add(sequence(2, [*prompt, 99], max_tokens=1))
    chunks, _ = run_step(sched, rng)
    assert [(c.seq.id, c.start, c.count) for c in chunks] == [(1, 12, 4), (2, 16, 1)]
    assert [c.seq.cached for c in chunks] == [12, 16]
    assert (sched.prefix_queries, sched.prefix_hits) == (16 + 16 + 17, 28)


def test_sequences_of_one_step_share_their_prefix():
    sched, rng = scheduler(tokens=64), random.Random(0)
    for number in range(4):
        sched.add(sequence(number, range(13), max_tokens=1))
    chunks, _ = run_step(sched, rng)
    assert [c.count for c in chunks] == [13, 1, 1, 1]


def test_salt_and_disabled_caching_keep_prefixes_apart():
    for caching, salts in ((True, (b"a", b"b")), (False, (b"", b""))):
        sched, rng = scheduler(caching=caching), random.Random(0)
        for number, salt in enumerate(salts):
            seq = sequence(number, range(13), max_tokens=1)
            seq.salt = salt
            sched.add(seq)
            chunks, _ = run_step(sched, rng)
            assert chunks[0].count == 13
        assert sched.prefix_hits == 0


def test_a_salt_that_spells_a_prefix_does_not_open_it():
    """Another client's blocks must not be found by who names their digest as its salt."""
    sched, rng = scheduler(), random.Random(0)
    secret = sequence(0, range(13), max_tokens=1)
    secret.salt = b"secret"
    sched.add(secret)
    run_step(sched, rng)
    thief = sequence(1, range(4, 13), max_tokens=1)
    thief.salt = secret.digests[0]
    sched.add(thief)
    run_step(sched, rng)
    assert thief.cached == 0


def test_newest_is_preempted_and_comes_back_first():
    sched, rng = scheduler(blocks=6, size=4, model_len=24, caching=False), random.Random(0)
    old, new = sequence(0, [1] * 8, max_tokens=12), sequence(1, [2] * 7, max_tokens=8)
    late = sequence(2, [3], max_tokens=1)
    sched.add(old)
    sched.add(new)
    while new.preemptions == 0:
        run_step(sched, rng)
    assert new.status is Status.WAITING
    assert new.computed == 0
    assert not new.pages
    sched.add(late)
    order = []
    while sched.has_work:
        order += [chunk.seq.id for chunk in run_step(sched, rng)[0]]
    assert order.index(1) < order.index(2), "a preempted sequence is older than those that queue behind it"
    assert new.output_len == 8
    assert sched.pool.num_available == 6


def test_a_sequence_that_never_fits_is_refused_with_numbers():
    sched = scheduler(blocks=4, size=4, model_len=64)
    sched.check(8, 9)  # the last token needs no page
    with pytest.raises(RequestError, match=r"needs 5 KV cache blocks.*cache has 4"):
        sched.check(8, 10)
    with pytest.raises(RequestError, match=r"64 tokens.*needs 70: 60 in the prompt and 10 to generate"):
        sched.check(60, 10)


def test_finish_is_idempotent_in_every_state():
    sched, rng = scheduler(), random.Random(0)
    waiting, running = sequence(0, [1]), sequence(1, [2])
    sched.add(running)
    run_step(sched, rng)
    sched.add(waiting)
    for seq in (waiting, running, waiting, running):
        sched.finish(seq)
        sched.check_integrity()
    assert not sched.has_work
    assert sched.pool.num_used == 0


@pytest.mark.parametrize("seed", range(8))
def test_thousands_of_random_arrivals(seed):
    """Few pages, shared prefixes, random aborts: every step legal, everyone served, every page returned."""
    rng = random.Random(seed)
    size = rng.choice([1, 3, 4, 16])
    sched = scheduler(
        blocks=-(-48 // size) + rng.randrange(8),
        size=size,
        model_len=48,
        seqs=rng.choice([1, 3, 8]),
        tokens=rng.choice([1, 5, 32]),
        caching=rng.random() < 0.8,
    )
    alive, total, steps = {}, 0, 0
    while total < 300 or sched.has_work:
        if total < 300 and rng.random() < 0.5:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
            most = rng.randrange(1, 48 - len(prompt))
            seq = sequence(total, prompt, max_tokens=most, scored=rng.random() < 0.3)
            sched.check(len(prompt), seq.params.max_tokens)
            sched.add(seq)
            alive[total] = seq
            total += 1
        if alive and rng.random() < 0.02:
            sched.finish(alive.pop(rng.choice(list(alive))))
        had_work, oldest = sched.has_work, min(alive, default=None)
        before = alive[oldest].computed if oldest is not None else 0
        chunks, finished = run_step(sched, rng)
        assert bool(chunks) == had_work
        if oldest is not None and sched.limits.max_num_batched_tokens >= sched.limits.max_num_seqs:
            assert alive[oldest].computed > before or alive[oldest] in finished, "the oldest sequence must move"
        for seq in finished:
            assert seq.output_len == seq.params.max_tokens
            del alive[seq.id]
        steps += 1
        assert steps < 100_000
    assert not alive
    assert sched.pool.num_used == 0
