"""Factors of keys: powers of two, one a pair that turns, that leave scores as they are and less noise in them."""

import numpy as np
import pytest

from planc.compiler.ir.balance import balanced, factors
from planc.compiler.ir.quant import quantize_rows
from planc.compiler.ir.recipe import const, evaluate, infer, step

D, HALF = 64, 24


def uneven(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    keys, queries = (1 + 0.3 * rng.standard_normal(D).astype(np.float32) for _ in range(2))
    keys[[3, 40, 60]] = (25, 14, -30)
    return keys, queries


def noise(keys: np.ndarray, queries: np.ndarray, rng: np.random.Generator) -> float:
    """Of scores with keys in codes, by normed rows that these weights make."""
    k, q = (rng.standard_normal((300, D)).astype(np.float32) * w for w in (keys, queries))
    codes, scale = quantize_rows(k, "i8")
    return float(np.square(q @ (codes.astype(np.float32) * scale[:, None] - k).T).mean())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [0, HALF, D // 2])
def test_pairs_have_one_power_of_two(half: int, interleaved: bool) -> None:
    s = factors(*uneven(0), half, interleaved)
    assert (np.log2(s) % 1 == 0).all()
    turning = s[: 2 * half]
    first, second = (turning[::2], turning[1::2]) if interleaved else (turning[:half], turning[half:])
    np.testing.assert_array_equal(first, second)
    assert len(set(s)) > 1


def test_large_features_cost_the_others_no_digits() -> None:
    keys, queries = uneven(np.random.default_rng().integers(1 << 30))
    attrs = {"half": HALF, "interleaved": False}
    made = [balanced(keys, queries, attrs | {"of": of}) for of in ("keys", "queries")]
    rng = np.random.default_rng(1)
    assert noise(*made, rng) < 0.3 * noise(keys, queries, rng)
    np.testing.assert_array_equal(made[0] * made[1], keys * queries)


def test_even_keys_stay_as_they_are() -> None:
    keys, queries = np.full(D, 1.5, np.float32), np.linspace(0.9, 1.1, D, dtype=np.float32)
    np.testing.assert_array_equal(factors(keys, queries, HALF, False), 1)


def test_a_weight_of_zeros_is_no_reason_to_fail() -> None:
    keys = np.zeros(D, np.float32)
    assert np.isfinite(factors(keys, keys, HALF, False)).all()


def test_a_recipe_makes_it_of_two_weights() -> None:
    keys, queries = uneven(2)
    k, q = (const(name, "f32", (D,)) for name in "kq")
    recipe = step("balance", k, q, of="queries", half=HALF, interleaved=True)
    assert infer(recipe) == infer(q)
    made = evaluate(recipe, lambda name: keys, {"k": keys, "q": queries})
    np.testing.assert_array_equal(made, queries * factors(keys, queries, HALF, True))
