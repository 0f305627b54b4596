"""Dependencies: every pair of launches that must not change places is ordered, by as few edges as say it."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from planc.codegen.cuda.hazards import Hazards, Span

SPAN = st.tuples(st.sampled_from("ab"), st.integers(0, 12), st.integers(1, 6)).map(lambda s: (s[0], s[1], s[1] + s[2]))
LAUNCHES = st.lists(st.tuples(st.lists(SPAN, max_size=3), st.lists(SPAN, max_size=2)), min_size=1, max_size=12)


def overlap(one: list[Span], other: list[Span]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in one for b in other)


def closure(deps: list[tuple[int, ...]]) -> np.ndarray:
    """[n, n]: what each launch waits for, by whatever way."""
    waits = np.zeros((len(deps), len(deps)), bool)
    for i, found in enumerate(deps):
        for d in found:
            waits[i] |= waits[d]
            waits[i, d] = True
    return waits


@settings(max_examples=300, deadline=None)
@given(LAUNCHES)
def test_conflicts_are_ordered_and_nothing_is_said_twice(launches: list[tuple[list[Span], list[Span]]]) -> None:
    hazards = Hazards()
    deps = [hazards.add(reads, writes) for reads, writes in launches]
    waits = closure(deps)
    conflict = np.zeros_like(waits)
    for i, (reads, writes) in enumerate(launches):
        for j, (before, written) in enumerate(launches[:i]):
            conflict[i, j] = overlap(reads, written) or overlap(writes, before) or overlap(writes, written)
    assert (waits | ~conflict).all(), "a conflict is not ordered"
    direct = closure([tuple(np.flatnonzero(row)) for row in conflict])
    assert (direct | ~waits).all(), "launches wait that need not"
    for i, found in enumerate(deps):
        for d in found:
            assert not any(waits[e, d] for e in found if e != d), f"{i} waits for {d} twice"


def test_readers_of_one_buffer_do_not_wait_for_each_other() -> None:
    hazards, x, y = Hazards(), ("act", 0, 64), ("act", 64, 128)
    assert hazards.add([], [x]) == ()
    assert hazards.add([x], [y]) == (0,)
    assert hazards.add([x], [("act", 128, 192)]) == (0,)
    assert hazards.add([y], [x]) == (1, 2), "a writer waits for all readers"
