"""expert_linear and weighted_sum: every format, shares of experts of any size, equal bits in every step."""

import ml_dtypes
import numpy as np
import pytest

from planc.compiler.ir.ops import OPS
from tests.kernels.harness import Case, Library, assert_close, assert_same_bits, case, f32, i32, random, tensor

LAYOUTS = {"f32": "n64", "bf16": "n64k2", "i8": "n64u4"}
TOKENS = 230


def experts(dtype: str, e: int, n: int, k: int, slots: int, **extra) -> Case:
    x = f32("T", slots, k) if extra.get("apart") else f32("T", k, layout=extra.get("x", "row"))
    ids = i32(slots) if extra.get("shared") else tensor("i32", "T", slots, layout=extra.get("ids", "row"))
    types = [x, ids, tensor(dtype, e, n, k, layout=LAYOUTS[dtype])]
    bias = bool(extra.get("bias"))
    types += [f32(e, n)] * ((dtype == "i8") + bias)
    attrs = {"scheme": "int8-wo"} if dtype == "i8" else {}
    return case(
        "qexpert_linear" if dtype == "i8" else "expert_linear", *types, **attrs, **({"bias": True} if bias else {})
    )


EXPERTS = {
    **{f"{d}": experts(d, 5, 130, 37, 2) for d in LAYOUTS},
    **{f"{d}, bias, apart": experts(d, 3, 96, 64, 2, bias=True, apart=True) for d in LAYOUTS},
    "views": experts("f32", 4, 65, 20, 3, x="strides:33", ids="strides:9"),
    "all tokens, the same experts": experts("bf16", 4, 64, 300, 4, shared=True),
    "one expert": experts("f32", 1, 20, 8, 1),
    "many experts": experts("i8", 64, 32, 16, 6),
}
SUM = case("weighted_sum", f32("T", 3, 70, layout="strides:300,80"), f32("T", 3, layout="strides:5"))
CASES = [*EXPERTS.values(), SUM]
NIGHTLY = ("cpu:x86-64-v4",)  # see conftest.py


def arrays(c: Case, tokens: int) -> list[np.ndarray]:
    """Ids lean to the first expert, and some are none: -1 and E."""
    w = c.types[2]
    e, n, k = (int(d) for d in w.shape)
    rng = np.random.default_rng(3)
    shape = [tokens if d == "T" else int(d) for d in c.types[1].shape]
    ids = np.where(rng.random(shape) < 0.4, 0, rng.integers(-1, e + 1, shape)).astype(np.int32)
    made = [random(*(tokens if d == "T" else int(d) for d in c.types[0].shape), seed=1), ids]
    if w.dtype == "i8":
        made += [rng.integers(-128, 128, (e, n, k)).astype(np.int8), np.abs(random(e, n, seed=3)) + 0.01]
    else:
        made.append(random(e, n, k, seed=2).astype(ml_dtypes.bfloat16 if w.dtype == "bf16" else np.float32))
    return made + ([random(e, n, seed=4)] if dict(c.attrs).get("bias") else [])


def some(c: Case, given: list[np.ndarray], rows: np.ndarray | slice) -> list[np.ndarray]:
    return [g[rows] if t.shape[0] == "T" else g for g, t in zip(given, c.types, strict=True)]


@pytest.mark.parametrize("name", EXPERTS)
def test_close_to_float64(library: Library, name: str) -> None:
    c = EXPERTS[name]
    given = arrays(c, TOKENS)
    read = [library.multiplied(c, given[0]), *given[1:]]
    wide = [g if g.dtype.kind == "i" else g.astype(np.float64) for g in read]
    dense = [tensor(t.dtype, *t.shape) for t in c.types]
    (want,) = OPS[c.op].ref(dict(c.attrs), wide, dense)
    got = library.run(c, given, TOKENS)[0]
    assert_close(got.reshape(-1, got.shape[-1]), want.reshape(-1, got.shape[-1]), 2e-6, name)


@pytest.mark.parametrize("name", EXPERTS)
def test_a_row_has_the_same_bits_in_every_step(library: Library, name: str) -> None:
    c = EXPERTS[name]
    given = arrays(c, TOKENS)
    (whole,) = library.run(c, given, TOKENS)
    for rows in (1, 2, 3, 7, 30, 61, TOKENS):
        for threads in (1, 3, 16):
            (y,) = library.run(c, some(c, given, slice(0, rows)), rows, threads=threads)
            assert_same_bits(y, whole[:rows], f"{name}, {rows} rows, {threads} threads")
    order = np.random.default_rng(0).permutation(TOKENS)[:100]
    assert_same_bits(library.run(c, some(c, given, order), 100, threads=2)[0], whole[order], f"{name}, other order")


@pytest.mark.parametrize("dtype", LAYOUTS)
def test_bits_are_those_of_the_linear_layer(library: Library, dtype: str, tmp_path) -> None:
    e, slots = EXPERTS[dtype], 2
    n, k = e.types[2].shape[1:]
    one = case("qlinear" if dtype == "i8" else "linear", f32("T", k), tensor(dtype, n, k, layout=LAYOUTS[dtype]),
               *([f32(n)] if dtype == "i8" else []), **({"scheme": "int8-wo"} if dtype == "i8" else {}))  # fmt: skip
    linear = Library([one], str(library.target), tmp_path)
    given = arrays(e, 40)
    given[1][:] = np.int32([1, 4])
    (got,) = library.run(e, given, 40)
    for j, expert in enumerate((1, 4)[:slots]):
        (want,) = linear.run(one, [given[0], *(g[expert] for g in given[2:])], 40)
        assert_same_bits(np.ascontiguousarray(got[:, j]), want, dtype)


def test_an_expert_that_nobody_chose_may_hold_anything(library: Library) -> None:
    c = EXPERTS["f32"]
    given = arrays(c, 30)
    given[1][given[1] == 2] = 1
    (want,) = library.run(c, given, 30)
    given[2][2] = np.nan
    assert_same_bits(library.run(c, given, 30)[0], want)


def test_no_slot_at_all(library: Library) -> None:
    c = EXPERTS["f32"]
    given = arrays(c, 3)
    given[1][:] = 7
    assert (library.run(c, given, 3, threads=2)[0] == 0).all()


def test_weighted_sum(library: Library) -> None:
    y, w = random(9, 3, 70), random(9, 3, seed=1)
    (whole,) = library.run(SUM, [y, w], 9)
    assert_close(whole, np.einsum("tkn,tk->tn", y.astype(np.float64), w), 2e-6)
    for rows, threads in ((1, 1), (1, 3), (9, 4)):
        assert_same_bits(library.run(SUM, [y[:rows], w[:rows]], rows, threads=threads)[0], whole[:rows])
