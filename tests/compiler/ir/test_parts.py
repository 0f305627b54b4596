"""Parts of recipes: a part is the slice of the whole, read from no more than it needs, in memory of its own size."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from planc.compiler.ir.parts import part, pieces
from planc.compiler.ir.recipe import Recipe, cast, evaluate, infer, load, step
from planc.compiler.ir.shards import of_rank, shard
from planc.passes.quantize import lossless, narrow

RNG = np.random.default_rng(0)
EXPERTS, WIDE, DEEP = 6, 64, 8
TENSORS = {f"{half}{e}": RNG.standard_normal((WIDE, DEEP), np.float32) for half in "gu" for e in range(EXPERTS)}
TENSORS["fused"] = RNG.standard_normal((EXPERTS, 2 * WIDE, DEEP), np.float32)
TENSORS["flat"] = RNG.standard_normal((EXPERTS * WIDE, DEEP), np.float32)


def stack(half: str) -> Recipe:
    rows = (step("reshape", load(f"{half}{e}", "f32", (WIDE, DEEP)), shape=(1, WIDE, DEEP)) for e in range(EXPERTS))
    return step("concat", *rows, axis=0)


GATE_UP = step("concat", stack("g"), stack("u"), axis=1)
FUSED = load("fused", "f32", (EXPERTS, 2 * WIDE, DEEP))
FLAT = load("flat", "f32", (EXPERTS * WIDE, DEEP))
RECIPES = {
    "stack": stack("g"),
    "stacks": GATE_UP,
    "transposed": step("transpose", GATE_UP, perm=(0, 2, 1)),
    "experts last": step("transpose", GATE_UP, perm=(1, 2, 0)),
    "cast": step("cast", GATE_UP, dtype="bf16"),
    "codes": step("quantize", GATE_UP, scheme="int8-wo", part="q"),
    "scales": step("quantize", GATE_UP, scheme="int8-wo", part="s"),
    "packed": step("pack", step("quantize", GATE_UP, scheme="int8-wo", part="q"), layout="n64u4"),
    "fused": step("pack", FUSED, layout="n64k2"),
    "half": step("slice", FUSED, axis=1, start=WIDE, stop=2 * WIDE),
    "some": step("slice", FUSED, axis=0, start=1, stop=5),
    "rows": step("reshape", FLAT, shape=(EXPERTS, WIDE, DEEP)),
    "columns of a rank": of_rank(shard(stack("g"), 2, (((0, 4),), ((4, 8),))), 1),
    "rows of a rank": of_rank(shard(GATE_UP, 1, (((0, 9), (64, 73)), ((9, 18), (73, 82)))), 1),
    "added": step("add", GATE_UP, scalar=1.0),
}


class Reader:
    """Counts the bytes that recipes read."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, name: str) -> Any:
        self.bytes += TENSORS[name].nbytes
        return TENSORS[name].copy()

    def rows(self, name: str, start: int, stop: int) -> Any:
        self.bytes += TENSORS[name][start:stop].nbytes
        return TENSORS[name][start:stop].copy()


@pytest.mark.parametrize("name", RECIPES)
def test_a_part_is_the_slice_of_the_whole(name: str) -> None:
    recipe, reader = RECIPES[name], Reader()
    whole = evaluate(recipe, reader, {}, reader.rows)
    for start, stop in ((0, 1), (1, 3), (0, whole.shape[0]), (whole.shape[0] - 1, whole.shape[0])):
        taken = part(recipe, 0, start, stop)
        np.testing.assert_array_equal(evaluate(taken, reader, {}, reader.rows), whole[start:stop])
        np.testing.assert_array_equal(evaluate(taken, reader, {}), whole[start:stop])
    if "pack" not in name and name != "fused":
        axis = whole.ndim - 2
        np.testing.assert_array_equal(
            evaluate(part(recipe, axis, 2, 5), reader, {}), whole[(slice(None),) * axis + (slice(2, 5),)]
        )
        assert infer(part(recipe, axis, 2, 5)).shape[axis] == 3


@pytest.mark.parametrize("name", ["stack", "stacks", "transposed", "cast", "packed", "fused", "rows"])
def test_a_part_reads_what_it_needs(name: str) -> None:
    everything, some = Reader(), Reader()
    evaluate(RECIPES[name], everything, {}, everything.rows)
    evaluate(part(RECIPES[name], 0, 2, 4), some, {}, some.rows)
    assert some.bytes * EXPERTS == everything.bytes * 2


@pytest.mark.parametrize("name", RECIPES)
def test_pieces_are_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, reader = RECIPES[name], Reader()
    whole = evaluate(recipe, reader, {})
    monkeypatch.setattr("planc.compiler.ir.parts._PIECE", 2 * whole[0].nbytes)
    reader.bytes = 0
    made = list(pieces(recipe, reader, {}, reader.rows))
    np.testing.assert_array_equal(np.concatenate(made), whole)
    assert (len(made) > 1) == (name not in ("scales", "added"))
    assert reader.bytes <= sum(TENSORS[n].nbytes for n in RECIPES[name].loads)
    np.testing.assert_array_equal(np.concatenate(list(pieces(recipe, reader, {}, None))), whole)


def test_a_stack_takes_its_own_memory_and_one_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two halves of a fused tensor, each a stack of experts stored in bf16, in float32."""
    import ml_dtypes

    shape = (256, 512)
    leaf = lambda name: step("cast", load(name, "bf16", shape), dtype="f32")  # noqa: E731
    row = lambda name: step("reshape", leaf(name), shape=(1, *shape))  # noqa: E731
    halves = [step("concat", *(row(f"{half}{e}") for e in range(16)), axis=0) for half in "gu"]
    recipe = step("concat", *halves, axis=1)
    read = lambda name: np.ones(shape, ml_dtypes.bfloat16)  # noqa: E731
    whole, one = infer(recipe).nbytes(), 256 * 512 * 4
    assert peak(lambda: evaluate(recipe, read, {})) < whole + 2 * one
    monkeypatch.setattr("planc.compiler.ir.parts._PIECE", 2 * one)
    packed = step("pack", recipe, layout="n64")
    assert peak(lambda: [None for _ in pieces(packed, read, {}, None)]) < 7 * one


def peak(work: Any) -> int:
    tracemalloc.start()
    work()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def test_casts_stay_at_the_leaves_of_a_stack() -> None:
    """What the build's dtype makes of experts stored in another: no whole stack is ever widened or narrowed."""
    shape = (64, 8)
    rows = [step("reshape", load(f"g{e}", "f16", shape), shape=(1, *shape)) for e in range(3)]
    wide = cast(step("concat", *rows, axis=0), "f32")
    assert [r.op for r in wide.steps()][:3] == ["concat", "reshape", "cast"]
    narrowed = narrow(wide, "bf16")
    assert [r.op for r in narrowed.steps()][:4] == ["concat", "reshape", "cast", "cast"]
    assert all(r.op == "load" for r in lossless(wide).leaves())
    assert {r.op for r in lossless(wide).steps()} == {"concat", "reshape", "load"}
    mixed = step("concat", wide, step("reshape", load("g3", "f32", shape), shape=(1, *shape)), axis=0)
    assert lossless(mixed) == mixed
