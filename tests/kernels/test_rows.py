"""Reductions, softmax, running sums, topk, gather and scatter: ties, NaN, infinities, broadcasts and views."""

import numpy as np
import pytest

from planc.compiler.ir.ops import OPS
from tests.kernels.harness import Case, Library, assert_close, assert_same_bits, case, f32, i32, random

VIEW = f32("T", 3, 19, layout="strides:80,21")
CLOSE = {
    "amin": case("amin", VIEW),
    "prod": case("prod", f32("T", 70)),
    "softmax": case("softmax", VIEW),
    "softmax of one": case("softmax", f32("T", 1)),
    "softmax wide": case("softmax", f32("T", 2, 3, 2, 131)),
    "cumsum": case("cumsum", VIEW),
}
EXACT = {
    "argmax": case("argmax", VIEW),
    "top 4": case("topk", VIEW, k=4, largest=True),
    "bottom 4": case("topk", VIEW, k=4, largest=False),
    "top 1": case("topk", f32("T", 200), k=1, largest=True),
    "sorted": case("topk", f32("T", 19), k=19, largest=True),
    "sorted long": case("topk", f32("T", 200), k=200, largest=True),
    "sorted long, upwards": case("topk", f32("T", 2, 200), k=150, largest=False),
    "gather": case("gather", VIEW, i32("T", 3, 5)),
    "gather from one row": case("gather", f32(1, 1, 19), i32("T", 3, 5)),
    "gather by one row": case("gather", VIEW, i32("T", 1, 5)),
    "gather ints": case("gather", i32("T", 19), i32("T", 40)),
    "scatter": case("scatter", VIEW, i32("T", 3, 5), f32("T", 3, 5)),
    "scatter one": case("scatter", VIEW, i32("T", 3, 5), f32("T", 1, 1)),
    "scatter add": case("scatter", VIEW, i32("T", 3, 5), f32("T", 3, 5), add=True),
    "scatter a number": case("scatter", f32(1, 1, 19), i32("T", 3, 5), scalar=-1.5),
}
CASES = {**CLOSE, **EXACT}


def arrays(c: Case, rows: int, special: bool) -> list[np.ndarray]:
    made = []
    for i, t in enumerate(c.types):
        rng = np.random.default_rng(i)
        shape = [rows if d == "T" else int(d) for d in t.shape]
        if t.dtype == "i32":  # a few outside of the axis
            made.append(rng.integers(-2, 21, shape).astype(np.int32))
            continue
        x = random(*shape, seed=i, scale=3) if not special else (rng.integers(-6, 7, shape) / 2).astype(np.float32)
        if special and i == 0:
            x.flat[rng.integers(0, x.size, 8)] = [np.nan, np.inf, -np.inf, -0.0, 0.0, np.nan, np.inf, -np.inf]
        made.append(x)
    return made


@pytest.mark.parametrize("name", CLOSE)
def test_close_to_float64(library: Library, name: str) -> None:
    c = CASES[name]
    given = arrays(c, 9, special=False)
    (want,) = OPS[c.op].ref(dict(c.attrs), [g.astype(np.float64) for g in given], c.types)
    assert_close(library.run(c, given, 9)[0], want, 2e-6, name)


@pytest.mark.parametrize("name", CASES)
def test_special_values_and_ties_are_the_references(library: Library, name: str) -> None:
    c = CASES[name]
    given = arrays(c, 9, special=True)
    with np.errstate(all="ignore"):
        want = OPS[c.op].ref(dict(c.attrs), given, c.types)
    for got, w in zip(library.run(c, given, 9), want, strict=True):
        np.testing.assert_allclose(got, w, rtol=0 if name in EXACT else 2e-6, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_rows_and_threads_change_no_bit(library: Library, name: str) -> None:
    c = CASES[name]
    given = arrays(c, 9, special=False)
    whole = library.run(c, given, 9)
    for rows, threads in ((1, 1), (1, 4), (9, 2), (9, 5)):
        some = [g[:rows] if t.shape[0] == "T" else g for g, t in zip(given, c.types, strict=True)]
        for got, want in zip(library.run(c, some, rows, threads=threads), whole, strict=True):
            assert_same_bits(got, want[:rows], name)


def test_softmax_of_nothing_is_a_nan(library: Library) -> None:
    x = np.full((2, 3, 19), -np.inf, np.float32)
    x[1, :, 4] = 7
    (got,) = library.run(CASES["softmax"], [x], 2)
    assert np.isnan(got[0]).all()
    assert (got[1] == (np.arange(19) == 4)).all()


@pytest.mark.parametrize("name", ["softmax wide", "softmax of one"])
def test_in_place(library: Library, name: str) -> None:
    c = CASES[name]
    given = arrays(c, 4, special=False)
    assert_same_bits(library.run(c, given, 4, inplace=True)[0], library.run(c, given, 4)[0], name)
