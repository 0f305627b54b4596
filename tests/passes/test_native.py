"""Weights held in a scheme: moves of the floats become the same moves of the codes, or nothing at all."""

from dataclasses import replace

import numpy as np
import pytest

from planc.compiler.ir.quant import SCHEMES
from planc.compiler.ir.recipe import Recipe, evaluate, infer, load, step
from planc.compiler.ir.shards import of_rank, shard
from planc.errors import PlancError
from planc.passes.native import native_part

RNG = np.random.default_rng(0)
N, K = 40, 256


def held(name: str) -> tuple[dict[str, np.ndarray], dict[str, str], list[Recipe]]:
    """Two matrices by their names, with their parts; the schemes they are held in; their recipes."""
    row = SCHEMES[name]
    tensors: dict[str, np.ndarray] = {}
    for tensor in ("a", "b"):
        q, *others = (row.part(RNG.standard_normal((N, K)).astype(np.float32), p) for p in row.parts)
        parts = [q, *(other.astype(np.float32) for other in others)]
        tensors |= {f"{tensor}:{p}": array for p, array in zip(row.parts, parts, strict=True)}
        tensors[tensor] = row.dequantize(*parts)
    return tensors, dict.fromkeys(("a", "b"), name), [load(t, "f32", (N, K)) for t in ("a", "b")]


def moved(a: Recipe, b: Recipe) -> dict[str, Recipe]:
    """What merging layers and stacking experts makes."""
    both = step("concat", a, b, axis=0)
    stack = step("concat", *(step("reshape", r, shape=(1, N, K)) for r in (a, b)), axis=0)
    return {
        "one": a,
        "cast": step("cast", a, dtype="bf16"),
        "merged": both,
        "rows": step("slice", both, axis=0, start=8, stop=72),
        "stack": stack,
        "expert": step("slice", stack, axis=0, start=1, stop=2),
        "transposed twice": step(
            "transpose", step("cast", step("transpose", stack, perm=(0, 2, 1)), dtype="f32"), perm=(0, 2, 1)
        ),
        "half of each": step("slice", stack, axis=1, start=0, stop=N // 2),
    }


@pytest.mark.parametrize("name", ["int8", "fp8", "fp8-block", "awq-g64", "int4-wo-g32"])
def test_the_parts_are_those_of_the_moved_floats(name: str) -> None:
    tensors, native, recipes = held(name)
    row = SCHEMES[name]
    for what, recipe in moved(*recipes).items():
        parts = []
        for p in row.parts:
            made = native_part(recipe, p, row, native)
            assert made is not None, what
            array = evaluate(made, tensors.__getitem__, {})
            assert array.shape == infer(made).shape
            assert set(made.loads) <= {f"{t}:{p}" for t in ("a", "b")}
            parts.append(array)
        floats = recipe.inputs[0] if recipe.op == "cast" else recipe
        np.testing.assert_array_equal(row.dequantize(*parts), evaluate(floats, tensors.__getitem__, {}), err_msg=what)


def test_what_takes_groups_apart_has_no_parts() -> None:
    _, native, (a, b) = held("awq-g64")
    row = SCHEMES["awq-g64"]
    columns = step("slice", a, axis=1, start=0, stop=128)
    turned = step("transpose", a, perm=(1, 0))
    stack = step("reshape", a, shape=(1, N, K))
    elsewhere = step("transpose", step("transpose", stack, perm=(0, 2, 1)), perm=(2, 1, 0))
    joined = step("concat", a, b, axis=1)
    scaled = step("mul", a, scalar=2.0)
    flat = step("reshape", a, shape=(N * K,))
    for recipe in (columns, turned, elsewhere, joined, scaled, flat):
        assert native_part(recipe, "s", row, native) is None


def test_a_tensor_of_another_scheme_has_no_parts() -> None:
    _, native, (a, b) = held("awq-g64")
    row = SCHEMES["awq-g64"]
    assert native_part(a, "q", SCHEMES["awq-g32"], native) is None
    assert native_part(step("concat", a, b, axis=0), "q", row, {"a": "awq-g64"}) is None
    assert native_part(replace(a), "q", row, {}) is None


@pytest.mark.parametrize("name", ["int8", "fp8-block", "awq-g64"])
@pytest.mark.parametrize("axis", [0, 1])
def test_ranks_have_the_codes_of_their_parts(name: str, axis: int) -> None:
    tensors, native, (a, _) = held(name)
    row, half = SCHEMES[name], (N, K)[axis] // 2
    recipe = shard(step("cast", a, dtype="bf16"), axis, (((0, half),), ((half, 2 * half),)))
    for rank in range(2):
        found = [native_part(recipe, p, row, native) for p in row.parts]
        parts = [evaluate(of_rank(r, rank), tensors.__getitem__, {}) for r in found if r is not None]
        mine = np.split(tensors["a"], 2, axis)[rank]
        np.testing.assert_array_equal(row.dequantize(*parts), mine)


def test_ranks_that_take_groups_apart_are_refused() -> None:
    """Codes that a checkpoint holds are never rounded again, and two of its groups do not make four ranks' parts."""
    _, native, (a, _) = held("fp8-block")
    quarters = tuple((((r * K // 4), (r + 1) * K // 4),) for r in range(4))
    says = "a is held as fp8-block, in groups of 128 of its 256 inputs, which 4 ranks .*; --tp 2 keeps"
    with pytest.raises(PlancError, match=says):
        native_part(shard(a, 1, quarters), "s", SCHEMES["fp8-block"], native)
    assert native_part(shard(a, 1, quarters), "q", SCHEMES["fp8"], native) is None
