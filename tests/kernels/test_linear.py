"""linear and qlinear: every weight format, odd shapes, row counts around each tile, equal bits whatever the step."""

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.harness import Case, Library, assert_close, assert_same_bits, case, f32, random, tensor

LAYOUTS = {"f32": "n64", "bf16": "n64k2", "i8": "n64u4"}
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 13, 23, 24, 25, 48, 193, 200)


def linear(dtype: str, n: int, k: int, *, bias: bool = False, x: str = "row", inner: int = 0) -> Case:
    types = [f32("T", inner, k) if inner else f32("T", k, layout=x), tensor(dtype, n, k, layout=LAYOUTS[dtype])]
    types += [f32(n)] * ((dtype == "i8") + bias)
    attrs = {"scheme": "int8-wo"} if dtype == "i8" else {}
    return case("qlinear" if dtype == "i8" else "linear", *types, **attrs, **({"bias": True} if bias else {}))


CASES = [
    *(linear(d, n, k) for d in LAYOUTS for n, k in ((65, 3), (130, 518))),
    *(linear(d, 96, 64, bias=True, x="strides:150") for d in LAYOUTS),
    linear("f32", 40, 20, inner=3),
    linear("bf16", 1, 1),
]


def arrays(c: Case, rows: int) -> list[np.ndarray]:
    x, w = c.types[:2]
    n, k = w.shape
    made = [random(rows, *x.shape[1:], seed=1)]
    if w.dtype == "i8":
        made += [np.random.default_rng(2).integers(-128, 128, (n, k)).astype(np.int8), np.abs(random(n, seed=3)) + 0.01]
    else:
        made.append(random(n, k, seed=2).astype(ml_dtypes.bfloat16 if w.dtype == "bf16" else np.float32))
    return made + ([random(n, seed=4)] if dict(c.attrs).get("bias") else [])


def reference(c: Case, given: list[np.ndarray]) -> np.ndarray:
    wide = [np.asarray(a, np.float64) for a in given]
    y = wide[0] @ wide[1].T
    if c.op == "qlinear":
        y = y * wide[2]
    return y + wide[-1] if dict(c.attrs).get("bias") else y


@pytest.mark.parametrize("c", CASES, ids=str)
def test_close_to_float64(library: Library, c: Case) -> None:
    given = arrays(c, 200)
    (y,) = library.run(c, given, 200)
    assert_close(y, reference(c, [library.multiplied(c, given[0]), *given[1:]]), 2e-6, c)


@pytest.mark.parametrize("c", CASES, ids=str)
def test_a_row_has_the_same_bits_in_every_step(library: Library, c: Case) -> None:
    given = arrays(c, max(ROWS))
    (whole,) = library.run(c, given, max(ROWS))
    for rows in ROWS:
        for threads in (1, 3):
            (y,) = library.run(c, [given[0][:rows], *given[1:]], rows, threads=threads)
            assert_same_bits(y, whole[:rows], f"{c}, {rows} rows, {threads} threads")


def test_a_row_does_not_see_its_neighbours(library: Library) -> None:
    c = CASES[1]
    given = arrays(c, 24)
    (whole,) = library.run(c, given, 24)
    spoiled = given[0].copy()
    spoiled[np.arange(24) != 7] = np.nan
    (y,) = library.run(c, [spoiled, *given[1:]], 24)
    assert_same_bits(y[7], whole[7])


def test_more_threads_than_columns(library: Library) -> None:
    c = CASES[-1]
    given = arrays(c, 2)
    assert_same_bits(library.run(c, given, 2, threads=9)[0], library.run(c, given, 2)[0])
