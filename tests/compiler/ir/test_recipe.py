"""Recipes: packing and quantizing are inverses within bounds; a wrong checkpoint tensor is refused by name."""

import ml_dtypes
import numpy as np
import pytest

from planc.compiler.ir.packing import pack, unpack
from planc.compiler.ir.quant import SCHEMES
from planc.compiler.ir.recipe import constant, evaluate, infer, load, step
from planc.compiler.ir.types import DTYPES, PACKED, TensorType
from planc.compiler.weights import stored_shape

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("layout", PACKED)
@pytest.mark.parametrize("shape", [(64, 8), (1, 1), (65, 7), (200, 33), (3, 70, 9)])
def test_unpack_is_the_inverse_of_pack(layout: str, shape: tuple[int, ...]) -> None:
    halves = layout in ("n64k8", "k2")
    w = RNG.integers(0, 16, shape).astype(np.uint8) if halves else RNG.integers(-127, 127, shape).astype(np.int8)
    packed = pack(w, layout)
    if layout != "k2":
        assert packed.shape[-2:] == (64, 4 if halves else PACKED[layout])
    assert (unpack(packed, shape, layout) == w).all()
    if layout == "n64u4":
        packed = (packed.view(np.uint8) ^ 0x80).view(np.int8)
    if not halves:
        assert int(np.abs(packed.astype(int)).sum()) == int(np.abs(w.astype(int)).sum())


def test_a_stack_is_packed_and_quantized_one_by_one() -> None:
    w = RNG.standard_normal((3, 70, 9)).astype(np.float32)
    scheme = SCHEMES["int8"]
    for layout in PACKED:
        dtype = "u4" if layout in ("n64k8", "k2") else "f32"
        made = pack(np.abs(w).astype(DTYPES[dtype]), layout)
        assert (made[1] == pack(np.abs(w[1]).astype(DTYPES[dtype]), layout)).all()
        t = TensorType(dtype, w.shape, layout)
        assert made.shape == stored_shape(t)
        assert made.nbytes == t.nbytes()
    for part in ("q", "s"):
        assert (scheme.part(w, part)[2] == scheme.part(w[2], part)).all()
        assert scheme.part_type(TensorType("f32", w.shape), part).shape == scheme.part(w, part).shape


def test_a_packed_lane_holds_neighbours_in_k_of_one_channel() -> None:
    w = np.arange(128 * 8, dtype=np.float32).reshape(128, 8)
    assert (pack(w, "n64k4")[1, 1, 3] == w[64 + 3, 4:8]).all()
    signed = (w.astype(np.int32) % 256 - 128).astype(np.int8)
    assert (pack(signed, "n64u4")[1, 1, 3].view(np.uint8) == signed[64 + 3, 4:8].astype(np.int32) + 128).all()
    codes = w.astype(np.uint8) % 16
    assert (pack(codes, "k2")[5] == codes[5, ::2] + 16 * codes[5, 1::2]).all()


def test_int8_error_is_half_a_step_per_channel() -> None:
    w = (RNG.standard_normal((70, 33)) * 10.0 ** RNG.integers(-3, 3, (70, 1))).astype(np.float32)
    w[5] = 0
    scheme = SCHEMES["int8"]
    q, s = scheme.part(w, "q"), scheme.part(w, "s")
    assert np.abs(q).max() <= 127
    assert (np.abs(scheme.dequantize(q, s) - w) <= s[:, None] * 0.5000001).all()


def test_int8_refuses_infinity() -> None:
    w = np.ones((4, 4), np.float32)
    w[2, 1] = np.inf
    with pytest.raises(ValueError, match="NaN or infinity"):
        SCHEMES["int8"].part(w, "s")


def test_quantizing_a_concat_is_concatenating_the_quantized() -> None:
    a, b = RNG.standard_normal((2, 10, 16)).astype(np.float32)
    scheme = SCHEMES["int8"]
    for part in ("q", "s"):
        whole = scheme.part(np.concatenate([a, b]), part)
        assert (whole == np.concatenate([scheme.part(a, part), scheme.part(b, part)])).all()


def test_a_recipe_evaluates_step_by_step() -> None:
    a = RNG.standard_normal((6, 4)).astype(ml_dtypes.bfloat16)
    b = RNG.standard_normal((3, 4)).astype(ml_dtypes.bfloat16)
    both = step("concat", load("a", "bf16", (6, 4)), load("b", "bf16", (3, 4)), axis=0)
    recipe = step("add", step("cast", both, dtype="f32"), scalar=1.0)
    made = evaluate(recipe, {"a": a, "b": b}.__getitem__, {})
    assert made.dtype == np.float32
    assert str(infer(recipe)) == "f32[9, 4]"
    assert (made == np.concatenate([a, b]).astype(np.float32) + 1).all()


WRONG = [(np.zeros((2, 3), np.float32), "shape"), (np.zeros((3, 2), np.float64), "dtype")]


@pytest.mark.parametrize(("array", "word"), WRONG)
def test_a_tensor_unlike_the_recipe_is_refused_by_name(array: np.ndarray, word: str) -> None:
    with pytest.raises(ValueError, match=f"w.0 has {word}"):
        evaluate(load("w.0", "f32", (3, 2)), lambda name: array, {})


def test_constants_are_named_by_content() -> None:
    first, entry = constant(np.arange(6, dtype=np.float32))
    again, _ = constant(np.arange(6, dtype=np.float32))
    other, _ = constant(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert first == again != other
    assert (evaluate(first, lambda name: np.empty(0), entry) == np.arange(6)).all()
