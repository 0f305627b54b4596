"""Parts of ranks as recipe steps: their types, what each rank's comes to, and what is refused."""

import numpy as np
import pytest

from planc.compiler.ir.graph import Graph, Value, Weight
from planc.compiler.ir.recipe import Recipe, evaluate, infer, load, step
from planc.compiler.ir.shards import graph_of_rank, of_rank, ranges_of, ranks_of, shard
from planc.compiler.ir.text import parse, to_text
from planc.compiler.ir.types import TensorType
from planc.compiler.ir.verify import verify

W = np.arange(48, dtype=np.float32).reshape(8, 6)
LOAD = load("w", "f32", (8, 6))
READ = {"w": W}.__getitem__
HALVES = (((0, 4),), ((4, 8),))
SHARED = (((0, 2), (6, 7)), ((2, 4), (6, 7)))  # two rows each, and one that both have


@pytest.mark.parametrize("ranges", [HALVES, SHARED])
@pytest.mark.parametrize("turned", [False, True])
def test_each_rank_has_its_rows(ranges, turned: bool) -> None:
    whole = step("transpose", LOAD, perm=(1, 0)) if turned else LOAD
    made = shard(whole, int(turned), ranges)
    assert ranges_of(dict(made.attrs)) == ranges
    assert ranks_of(step("cast", made, dtype="bf16")) == 2
    for rank, mine in enumerate(ranges):
        rows = np.concatenate([W[start:stop] for start, stop in mine])
        recipe = of_rank(made, rank)
        assert infer(recipe) == infer(made)
        assert ranks_of(recipe) == 1
        np.testing.assert_array_equal(evaluate(recipe, READ, {}), rows.T if turned else rows)


def test_no_more_is_read_than_the_rank_needs() -> None:
    read: list[tuple[int, int]] = []

    def rows(name: str, start: int, stop: int) -> np.ndarray:
        read.append((start, stop))
        return W[start:stop]

    made = shard(step("cast", LOAD, dtype="f16"), 0, HALVES)
    np.testing.assert_array_equal(evaluate(of_rank(made, 1), READ, {}, rows), W[4:].astype(np.float16))
    assert read == [(4, 8)]


def test_it_prints_and_parses() -> None:
    weight = Weight(Value("w.split", TensorType("f32", (3, 6))), shard(LOAD, 0, SHARED))
    graph = Graph("g", (), (weight,), (), ("w.split",))
    verify(graph, "test")
    assert parse(to_text(graph)) == graph
    (of_first,) = graph_of_rank(graph, 0).weights
    np.testing.assert_array_equal(evaluate(of_first.recipe, READ, {}), W[[0, 1, 6]])


@pytest.mark.parametrize("ranges", [(((0, 4),), ((4, 7),)), (((0, 4),), ((5, 9),)), (((4, 4),), ((4, 4),))])
def test_parts_that_are_not_of_one_size_or_not_there(ranges) -> None:
    with pytest.raises(ValueError, match="shard: parts"):
        infer(shard(LOAD, 0, ranges))


def test_bounds_that_do_not_fit_their_count() -> None:
    with pytest.raises(ValueError, match="2 parts need 4 bounds, got 3"):
        infer(Recipe("shard", (LOAD,), (("axis", 0), ("counts", (1, 1)), ("ranges", (0, 4, 4)))))


def test_the_parts_of_all_ranks_have_no_bytes() -> None:
    with pytest.raises(ValueError, match="differs by rank"):
        evaluate(shard(LOAD, 0, HALVES), READ, {})
