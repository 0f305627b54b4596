"""Comparisons, choices, rounding and whole-number division, exactly; fused chains against the ops that they name."""

import numpy as np
import pytest

from planc.compiler.ir.fused import parse
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.refs import COMPARE
from tests.kernels.harness import Case, Library, assert_close, assert_same_bits, case, f32, i32, random

DIVISIONS = ("remainder", "floor_divide")
EXACT = {
    **{op: case(op, f32("T", 37)) for op in ("round", "ceil", "trunc", "floor", "sign")},
    **{op: case(op, f32("T", 37), f32("T", 37)) for op in (*COMPARE, *DIVISIONS)},
    **{f"{op} ints": case(op, i32("T", 37), i32("T", 1)) for op in (*COMPARE, *DIVISIONS)},
    **{f"{op} a half": case(op, f32("T", 37), scalar=0.5, reversed=True) for op in (*COMPARE, *DIVISIONS)},
    **{f"{op} minus three": case(op, i32("T", 37), scalar=-3) for op in (*COMPARE, *DIVISIONS)},
    "where": case("where", f32("T", 1), f32("T", 37), f32(37)),
    "where ints": case("where", f32("T", 37), i32("T", 37), i32("T", 1)),
    "sign ints": case("sign", i32("T", 37)),
    "abs ints": case("abs", i32("T", 37)),
}
CODES = {  # every op of the table, and each kind of argument
    "powers": "pow(i0,2.0);pow(i1,3.0);pow(2.0,i1);add(t0,t1);add(t3,t2)",
    "numbers": "maximum(i0,-inf);minimum(t0,inf);where(gt0,t1,nan)".replace("gt0", "1.0"),
    "chain": "mul(i0,0.5);gelu_tanh(t0);gt(t1,i1);where(t2,t1,-1e-05);maximum(t3,i2);gelu(t4);silu(t5);sub(1.0,t6)",
    "first is a weight": "add(i0,i1);tanh(t0)",
}
FUSED = {
    "powers": case("fused", f32("T", 37), f32("T", 1), code=CODES["powers"]),
    "numbers": case("fused", f32("T", 5), code=CODES["numbers"]),
    "chain": case("fused", f32("T", 3, 21, layout="strides:80,21"), f32("T", 3, 1), f32(21), code=CODES["chain"]),
    "first is a weight": case("fused", f32(5), f32("T", 5), code=CODES["first is a weight"]),
}
CASES = {**EXACT, **{f"fused {k}": c for k, c in FUSED.items()}}


def specials(c: Case, rows: int) -> list[np.ndarray]:
    """Whole numbers and halves, so that equals and ties abound, with NaN, infinities and zeros among them."""
    made = []
    for i, t in enumerate(c.types):
        rng = np.random.default_rng(i)
        x = rng.integers(-6, 7, [rows if d == "T" else int(d) for d in t.shape])
        if t.dtype == "i32":
            made.append(x.astype(np.int32))
            continue
        x = (x / 2).astype(np.float32)
        x.flat[rng.integers(0, x.size, 8)] = [np.nan, np.inf, -np.inf, -0.0, 0.0, np.nan, 2.5, 2**25]
        made.append(x)
    return made


@pytest.mark.parametrize("name", EXACT)
def test_equal_to_the_reference(library: Library, name: str) -> None:
    c = CASES[name]
    given = specials(c, 9)
    with np.errstate(all="ignore"):
        (want,) = OPS[c.op].ref(dict(c.attrs), given, c.types)
    for rows, threads in ((9, 1), (9, 4), (1, 3)):
        some = [g[:rows] if t.shape[0] == "T" else g for g, t in zip(given, c.types, strict=True)]
        np.testing.assert_array_equal(library.run(c, some, rows, threads=threads)[0], want[:rows], name)


def test_the_smallest_number_by_minus_one_stops_nothing(library: Library) -> None:
    x = np.full((1, 37), -(2**31), np.int32)
    for op, want in (("remainder", 0), ("floor_divide", -(2**31))):
        (got,) = library.run(CASES[f"{op} ints"], [x, np.array([[-1]], np.int32)], 1)
        assert (got == want).all()
        (got,) = library.run(CASES[f"{op} ints"], [x, np.array([[0]], np.int32)], 1)
        assert (got == 0).all()


def test_the_branch_not_taken_may_hold_anything(library: Library) -> None:
    bad = np.full((2, 37), np.nan, np.float32)
    (got,) = library.run(CASES["where"], [np.float32([[1], [0]]), random(2, 37), bad[0]], 2)
    assert np.isfinite(got[0]).all()
    assert np.isnan(got[1]).all()


@pytest.mark.parametrize("name", FUSED)
def test_fused_is_close_to_float64_and_equal_in_every_step(library: Library, name: str) -> None:
    c = FUSED[name]
    given = [random(*(9 if d == "T" else int(d) for d in t.shape), seed=i) for i, t in enumerate(c.types)]
    (want,) = OPS["fused"].ref(dict(c.attrs), [g.astype(np.float64) for g in given], c.types)
    (whole,) = library.run(c, given, 9)
    assert_close(whole, want, 2e-6, name)
    for rows, threads in ((1, 1), (4, 3), (9, 2)):
        some = [g[:rows] if t.shape[0] == "T" else g for g, t in zip(given, c.types, strict=True)]
        assert_same_bits(library.run(c, some, rows, threads=threads)[0], whole[:rows], name)


def test_a_chain_gives_the_bits_of_its_ops(library: Library) -> None:
    assert [s.op for s in parse(CODES["chain"])][-1] == "sub"
    x = random(4, 5)
    (got,) = library.run(FUSED["first is a weight"], [x[0], x], 4)
    assert_close(got, np.tanh(x[0].astype(np.float64) + x), 1e-6)


def test_fused_in_place(library: Library) -> None:
    c = CASES["fused powers"]
    given = [random(4, 37), random(4, 1, seed=1)]
    assert_same_bits(library.run(c, given, 4, inplace=True)[0], library.run(c, given, 4)[0])
