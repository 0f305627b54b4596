"""Orders of launches: random ones keep every edge, and bytes that no edge protects are found."""

from __future__ import annotations

import random

import numpy as np
import pytest

from planc.emulator.memory import Memory
from planc.emulator.order import Touched, ancestors, random_order

DIAMOND = [(), (0,), (0,), (1, 2), ()]


def test_random_orders_keep_dependencies_and_differ() -> None:
    seen = {tuple(random_order(DIAMOND, random.Random(seed))) for seed in range(300)}
    assert len(seen) == 10  # 5 places for the last launch, times two orders of the middle ones
    for order in seen:
        assert sorted(order) == list(range(5))
        assert all(order.index(d) < order.index(n) for n, deps in enumerate(DIAMOND) for d in deps)


def test_ancestors_are_transitive() -> None:
    assert ancestors(DIAMOND) == [0, 0b1, 0b1, 0b111, 0]


@pytest.fixture
def memory() -> Memory:
    return Memory(1 << 20)


def addresses(start: int, count: int, size: int) -> np.ndarray:
    return start + np.arange(count, dtype=np.uint64) * np.uint64(size)


@pytest.mark.parametrize(
    ("first", "second", "conflict"),
    [
        (("write", 0, 16, 4), ("write", 60, 4, 4), 60),
        (("write", 0, 16, 4), ("read", 63, 1, 1), 63),
        (("read", 32, 2, 16), ("write", 34, 1, 2), 34),
        (("read", 0, 16, 4), ("read", 0, 16, 4), None),
        (("write", 0, 16, 4), ("write", 64, 16, 4), None),
        (("write", 0, 8, 2), ("read", 16, 4, 4), None),
    ],
)
def test_bytes_that_two_unordered_launches_touch(first, second, conflict, memory) -> None:
    other, start = memory.alloc(500), memory.alloc(4096)
    touched = Touched(memory)
    for launch, (side, offset, count, size) in enumerate((first, second)):
        touched.read(addresses(other, 4, 1), 1)
        getattr(touched, side)(addresses(start + offset, count, size), size)
        touched.end(launch)
    found = touched.conflict([(), ()])
    assert found == (None if conflict is None else (0, 1, start + conflict))
    assert touched.conflict([(), (0,)]) is None


def test_lanes_in_several_allocations(memory) -> None:
    a, b = memory.alloc(64), memory.alloc(64)
    touched = Touched(memory)
    touched.write(np.array([a, b + 60], np.uint64), 4)
    touched.end(0)
    touched.read(np.array([b + 60, b], np.uint64), 4)
    touched.end(1)
    assert touched.conflict([(), ()]) == (0, 1, b + 60)


def test_what_is_ignored_is_not_watched(memory) -> None:
    weights = memory.alloc(64)
    touched = Touched(memory, [weights])
    touched.write(addresses(weights, 4, 4), 4)
    touched.end(0)
    touched.read(addresses(weights, 4, 4), 4)
    touched.end(1)
    assert touched.conflict([(), ()]) is None
