"""Turning rows: orthogonal, undone by `back`, in blocks that divide the features, and worth it where few are large."""

import numpy as np
import pytest

from planc.compiler.ir.hadamard import MOST, back, block, rotate
from planc.compiler.ir.quant import SCHEMES, quantize_rows


@pytest.mark.parametrize(("features", "size"), [(576, 64), (1536, MOST), (8192, MOST), (100, 4), (37, 1), (1, 1)])
def test_the_block_is_a_power_of_two_that_divides(features: int, size: int) -> None:
    assert block(features) == size


@pytest.mark.parametrize(("features", "size"), [(576, 64), (384, 128), (128, 128), (12, 4), (6, 2), (5, 1)])
def test_products_stay_and_back_undoes(features: int, size: int) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((5, features)), rng.standard_normal((2, 3, features))
    x32, w32 = x.astype(np.float32), w.astype(np.float32)
    kept = x32.copy()
    turned = rotate(x32, size)
    np.testing.assert_array_equal(x32, kept)
    np.testing.assert_allclose(turned @ rotate(w32, size).swapaxes(1, 2), x @ w.swapaxes(1, 2), atol=1e-4)
    np.testing.assert_allclose(back(turned, size), x, atol=1e-5)
    assert turned.dtype == np.float32


def test_a_row_is_turned_by_a_matrix_of_signs() -> None:
    matrix = rotate(np.eye(16, dtype=np.float32), 16) * 4
    assert set(np.unique(matrix)) == {-1, 1}
    np.testing.assert_array_equal(matrix @ matrix.T, 16 * np.eye(16))
    assert abs(rotate(np.ones((1, 128), np.float32), 128)).max() < 5  # what all have in common gathers in no feature


def test_few_large_features_cost_the_others_no_digits() -> None:
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((64, 1536)).astype(np.float32), rng.standard_normal((96, 1536)).astype(np.float32)
    x[:, [3, 700]] *= 100
    w[:, [3, 700]] /= 100
    row, want = SCHEMES["int8"], x.astype(np.float64) @ w.T

    def error(size: int) -> float:
        codes, scales = quantize_rows(x, "i8", size)
        given = row.dequantize(row.part(w, "q", hadamard=size), row.part(w, "s", hadamard=size))
        y = (codes.astype(np.float64) @ given.T) * scales[:, None]
        return float(np.linalg.norm(y - want) / np.linalg.norm(want))

    assert error(block(1536)) < 0.05 < 5 * error(block(1536)) < error(1)
