"""matmul of two activations: broadcast batches, views, widths around the vector, equal bits in every step."""

import numpy as np
import pytest

from tests.kernels.harness import Case, Library, assert_close, assert_same_bits, case, f32, random

CASES = [
    case("matmul", f32("T", 2, 3, 37), f32("T", 2, 37, 70)),
    case("matmul", f32("T", 4, 3, 8), f32("T", 1, 8, 5)),
    case("matmul", f32("T", 1, 8), f32("T", 8, 1)),
    case("matmul", f32("T", 8), f32(8, 130)),
    case("matmul", f32(2, 3, 8), f32("T", 2, 8, 16)),
    case("matmul", f32("T", 3, 8, layout="strides:60,11"), f32("T", 8, 64, layout="strides:700,80")),
]


def arrays(c: Case, rows: int) -> list[np.ndarray]:
    return [random(*(rows if d == "T" else int(d) for d in t.shape), seed=i) for i, t in enumerate(c.types)]


@pytest.mark.parametrize("c", CASES, ids=str)
def test_close_to_float64_and_equal_in_every_step(library: Library, c: Case) -> None:
    given = arrays(c, 7)
    (whole,) = library.run(c, given, 7)
    assert_close(whole, np.matmul(*(g.astype(np.float64) for g in given)), 2e-6, c)
    for rows, threads in ((1, 1), (1, 3), (7, 2), (7, 4)):
        some = [g[:rows] if t.shape[0] == "T" else g for g, t in zip(given, c.types, strict=True)]
        assert_same_bits(library.run(c, some, rows, threads=threads)[0], whole[:rows], c)
