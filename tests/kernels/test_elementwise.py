"""Elementwise ops, reductions and moves of data: accuracy, broadcasting, views, tails, in place."""

import numpy as np
import pytest

from planc.compiler.ir.ops import OPS
from planc.compiler.ir.refs import ACTS, BINARY, UNARY
from tests.kernels.harness import Case, Library, Tensor, assert_close, assert_same_bits, case, f32, i32, random, tensor

POSITIVE = ("log", "log1p", "sqrt", "rsqrt", "pow", "reciprocal")
UNARY_CASES = {op: case(op, f32("T", 37)) for op in UNARY}
BINARY_CASES = {op: case(op, f32("T", 37), f32("T", 37)) for op in BINARY}
ACT_CASES = {
    act: case("act_mul", f32("T", 20, layout="strides:47"), f32("T", 20, layout="strides:50"), act=act) for act in ACTS
}
OTHERS = {
    "gelu": case("gelu", f32("T", 33), tanh=False),
    "gelu_tanh": case("gelu", f32("T", 33), tanh=True),
    "scalar": case("mul", f32("T", 5), scalar=2.5),
    "reversed": case("sub", f32("T", 5), scalar=1, reversed=True),
    "square": case("pow", f32("T", 5), scalar=2),
    "cube": case("pow", f32("T", 5), scalar=3.0),
    "root": case("pow", f32("T", 5), scalar=0.5),
    "column": case("add", f32("T", 3, 1), f32("T", 3, 21)),
    "weight": case("mul", f32("T", 3, 21), f32(21)),
    "heads": case("mul", f32("T", 3, 21), f32(3, 1)),
    "middle": case("add", f32("T", 2, 1, 5), f32("T", 2, 3, 5)),
    "one row": case("add", f32("T", 4), f32(1, 4)),
    "vector": case("add", f32("T"), f32("T")),
    "positions": case("add", i32("T"), scalar=2),
    "bound": case("maximum", f32("T", 5), scalar=-0.5),
    "large number": case("add", i32("T"), scalar=2**24 + 1),
    "largest number": case("minimum", i32("T"), scalar=2**31 - 1),
    "to float": case("cast", i32("T"), dtype="f32"),
    "to int": case("cast", f32("T", 3), dtype="i32"),
    "sum": case("sum", f32("T", 3, 70)),
    "mean": case("mean", f32("T", 131)),
    "amax": case("amax", f32("T", 3, 19, layout="strides:60,19")),
    "concat": case("concat", f32("T", 3, 4), f32("T", 3, 1), f32("T", 3, 18, layout="strides:60,20"), axis=2),
    "concat heads": case("concat", f32("T", 1, 5), f32("T", 2, 5), axis=1),
    "transpose": case("transpose", f32("T", 3, 17), perm=(0, 2, 1)),
    "transpose view": case("transpose", f32("T", 2, 3, 5, layout="strides:90,40,6"), perm=(0, 3, 1, 2)),
    "transpose to five axes": case("transpose", f32("T", 2, 3, 4, 5), perm=(0, 4, 2, 3, 1)),
    "transpose ints": case("transpose", i32("T", 3, 7), perm=(0, 2, 1)),
    "transpose no tokens": case("transpose", f32(7, 5), perm=(1, 0)),
    "concat ints": case("concat", i32("T", 2), i32("T", 3), axis=1),
    "concat rows": case("concat", f32(2, 6), f32(3, 6), axis=0),
    "copy": case("copy", f32("T", 2, 18, layout="strides:64,20")),
    "copy ints": case("copy", tensor("i32", "T", 18, layout="strides:20")),
    "copy of columns": case("copy", f32("T", 4, 3, 2, 2, layout="strides:300,60,19,5")),
    "expand": case("expand", f32("T", 1, 2, 1), shape=(-1, 3, 2, 20)),
    "expand rows": case("expand", f32(1, 20), shape=(-1, 20), rows="T"),
    "expand ints": case("expand", i32("T", 1), shape=(-1, 5)),
    "five axes": case("mul", f32("T", 2, 1, 2, 1, 3), f32("T", 1, 3, 1, 2, 3)),
    "square ints": case("square", i32("T", 5)),
    "expm1 near zero": case("expm1", f32("T", 4)),
}
CASES = {
    **UNARY_CASES,
    **{f"{k} of two": c for k, c in BINARY_CASES.items()},
    **{f"act {k}": c for k, c in ACT_CASES.items()},
    **OTHERS,
}
TAKE = {
    "rows": case("take_rows", f32("T", 5), i32("R")),
    "rows of ints": case("take_rows", i32("T", 5), i32("R")),
    "wide rows": case("take_rows", f32("T", 2, 3, layout="strides:11,3"), i32("R")),
}
CASES |= TAKE
NAN_KEEPERS = ("relu", "act relu", "act relu2", "maximum of two", "minimum of two", "bound", "softplus", "silu")


def arrays(c: Case, rows: int) -> list[np.ndarray]:
    made = []
    for i, t in enumerate(c.types):
        shape = [rows if d == "T" else int(d) for d in t.shape]
        x = (np.arange(np.prod(shape)) * 7).reshape(shape) if t.dtype == "i32" else random(*shape, seed=i, scale=3)
        made.append(np.abs(x) + 0.1 if c.op in POSITIVE else x)
    return made


@pytest.mark.parametrize("name", [n for n in CASES if n not in TAKE])
def test_close_to_float64(library: Library, name: str) -> None:
    c = CASES[name]
    given = arrays(c, 5)
    wide = [g.astype(np.float64) if g.dtype == np.float32 else g for g in given]
    (want,) = OPS[c.op].ref(dict(c.attrs) | {"length": 5}, wide, c.types)
    (got,) = library.run(c, given, 5)
    assert_close(got, want, 2e-6, name)


@pytest.mark.parametrize("name", ["silu", "add of two", "heads", "sum", "concat", "middle"])
def test_rows_and_threads_change_no_bit(library: Library, name: str) -> None:
    c = CASES[name]
    given = arrays(c, 9)
    (whole,) = library.run(c, given, 9)
    for rows, threads in ((1, 1), (1, 4), (9, 2), (9, 5)):
        some = [g[:rows] if t.shape[0] == "T" else g for g, t in zip(given, c.types, strict=True)]
        assert_same_bits(library.run(c, some, rows, threads=threads)[0], whole[:rows], name)


@pytest.mark.parametrize("name", ["silu", "add of two", "gelu", "scalar"])
def test_may_write_over_the_first_input(library: Library, name: str) -> None:
    c = CASES[name]
    given = arrays(c, 4)
    assert_same_bits(library.run(c, given, 4, inplace=True)[0], library.run(c, given, 4)[0], name)


@pytest.mark.parametrize("name", TAKE)
def test_take_rows(library: Library, name: str) -> None:
    c = CASES[name]
    x, index = random(6, *c.types[0].shape[1:], scale=9), np.array([5, 0, 0, 3], np.int32)
    x = x.astype(np.int32) if c.types[0].dtype == "i32" else x
    for threads in (1, 3):
        assert_same_bits(library.run(c, [x, index], 4, threads=threads)[0], x[index], name)


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Error in units of the last place of the wanted float32, denormals counted at their own spacing."""
    return np.abs(got.astype(np.float64) - want) / np.spacing(np.abs(want).astype(np.float32)).astype(np.float64)


@pytest.mark.parametrize(
    ("op", "low", "high", "bound"),
    [("exp", -87, 88.7, 2), ("sigmoid", -80, 80, 4), ("tanh", -10, 10, 4), ("tanh", -0.7, 0.7, 4)],
)
def test_last_places(library: Library, op: str, low: float, high: float, bound: float) -> None:
    x = np.random.default_rng(0).uniform(low, high, (2000, 37)).astype(np.float32)
    (got,) = library.run(CASES[op], [x], 2000)
    want = {"exp": np.exp, "tanh": np.tanh, "sigmoid": lambda v: 1 / (1 + np.exp(-v))}[op](x.astype(np.float64))
    assert ulps(got, want).max() <= bound


def test_erf_to_a_few_ten_millionths(library: Library) -> None:
    x = np.linspace(-6, 6, 37 * 500).reshape(500, 37).astype(np.float32)
    (got,) = library.run(CASES["erf"], [x], 500)
    assert np.abs(got - UNARY["erf"](x.astype(np.float64))).max() < 4e-7


def test_ends_of_the_range(library: Library) -> None:
    x = np.zeros((1, 37), np.float32)
    x[0, :7] = [-np.inf, np.inf, np.nan, -200, 200, -100, 88.72]
    e, t, s = (library.run(CASES[op], [x], 1)[0][0] for op in ("exp", "tanh", "sigmoid"))
    np.testing.assert_array_equal(e[:5], [0, np.inf, np.nan, 0, np.inf])
    assert 0 < e[5] < 1e-42, "a denormal, not zero"
    assert np.isfinite(e[6])
    np.testing.assert_array_equal(t[:5], [-1, 1, np.nan, -1, 1])
    np.testing.assert_array_equal(s[:5], [0, 1, np.nan, 0, 1])
    for got, at_zero in ((e, 1), (t, 0), (s, 0.5)):
        assert (got[7:] == at_zero).all()


@pytest.mark.parametrize("name", ["large number", "largest number"])
def test_whole_numbers_are_exact(library: Library, name: str) -> None:
    c = CASES[name]
    given = np.array([0, 5, 7], np.int32)
    (got,) = library.run(c, [given], 3)
    np.testing.assert_array_equal(got, given + (2**24 + 1) if c.op == "add" else given)


@pytest.mark.parametrize("name", NAN_KEEPERS)
def test_nan_stays_a_nan(library: Library, name: str) -> None:
    c = CASES[name]
    given = [random(3, *(int(d) for d in t.shape[1:]), seed=i) for i, t in enumerate(c.types)]
    for x in given:
        clean = x.copy()
        x[1] = np.nan
        (got,) = library.run(c, given, 3)
        assert np.isnan(got[1]).all()
        assert not np.isnan(got[[0, 2]]).any()
        x[:] = clean


def test_amax_finds_a_nan_anywhere(library: Library) -> None:
    c = CASES["amax"]
    width = int(c.types[0].shape[-1])
    x = np.ones((3, *(int(d) for d in c.types[0].shape[1:])), np.float32)
    for i in range(width):
        x[..., i] = np.nan
        assert np.isnan(library.run(c, [x], 3)[0]).all()
        x[..., i] = 1


def test_guards_notice_a_write(library: Library) -> None:
    t = Tensor(tensor("f32", 4), (4,))
    t.buffer.after[0] = 0
    with pytest.raises(AssertionError, match="after the buffer"):
        t.buffer.check("x")
