"""Pointwise ops and moves on CUDA: every function against the op table, views, broadcasting, whole numbers."""

import ml_dtypes
import numpy as np
import pytest

from planc.compiler.ir.refs import ACTS, BINARY, COMPARE, UNARY
from planc.errors import PlancError
from tests.codegen.cuda.harness import made, reference, run
from tests.kernels.harness import Case, case, f32, i32, tensor

Array = np.ndarray
POSITIVE = ("log", "log1p", "sqrt", "rsqrt", "pow")
EXACT = ("neg", "abs", "square", "relu", "floor", "ceil", "trunc", "round", "sign", "reciprocal", "sqrt")


def given(c: Case, tokens: int, *, positive: bool = False, seed: int = 0) -> list[Array]:
    """Small and large numbers; whole ones for i32."""
    rng, out = np.random.default_rng(seed), []
    for t in c.types:
        shape = [tokens if isinstance(d, str) else d for d in t.shape]
        x = rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 2, shape)
        x = np.abs(x) + 1e-6 if positive else x
        out.append(rng.integers(-9, 10, shape).astype(np.int32) if t.dtype == "i32" else x.astype(np.float32))
    return out


def check(
    c: Case, arrays: list[Array], tolerance: float = 0.0, *, absolute: float = 0.0, inplace: bool = False
) -> None:
    with np.errstate(all="ignore"):
        (want,) = reference(c, arrays)
    (got,) = run(c, arrays, 90, inplace=inplace)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=absolute, err_msg=str(c))


@pytest.mark.parametrize("op", UNARY)
def test_functions_of_one_argument(op: str) -> None:
    c = case(op, f32("T", 37))
    check(c, given(c, 3, positive=op in POSITIVE), 0.0 if op in EXACT else 1e-5)


@pytest.mark.parametrize("op", BINARY)
def test_functions_of_two_arguments(op: str) -> None:
    c = case(op, f32("T", 37), f32("T", 37))
    check(c, given(c, 3, positive=op in POSITIVE), 2e-5 if op == "pow" else 0.0)


@pytest.mark.parametrize("act", ACTS)
def test_act_mul_of_halves_of_a_row(act: str) -> None:
    c = case("act_mul", f32("T", 20, layout="strides:47"), f32("T", 20, layout="strides:50"), act=act)
    check(c, given(c, 5), 1e-5, absolute=1e-6 if "gelu" in act else 0.0)


SPECIAL = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 2.5, 3.5, -2.5, 2**25, 1, -1, 0.5, -3, 7], np.float32)


@pytest.mark.parametrize("op", [*COMPARE, "remainder", "floor_divide", "maximum", "minimum", "where"])
def test_special_numbers(op: str) -> None:
    x, y = (a.ravel() for a in np.meshgrid(SPECIAL, SPECIAL))
    shape = f32("T", len(x))
    c = case(op, *(shape,) * (3 if op == "where" else 2))
    check(c, [x[None], y[None], x[None] + 1][: len(c.types)])


@pytest.mark.parametrize(
    "op", ["round", "ceil", "trunc", "floor", "sign", "relu", "tanh", "sigmoid", "softplus", "expm1"]
)
def test_special_numbers_of_one_argument(op: str) -> None:
    c = case(op, f32("T", len(SPECIAL)))
    check(c, [SPECIAL[None]], 1e-6)


@pytest.mark.parametrize("op", [*COMPARE, "add", "mul", "maximum", "remainder", "floor_divide"])
def test_whole_numbers(op: str) -> None:
    for c in (case(op, i32("T", 37), i32("T", 1)), case(op, i32("T", 37), scalar=-3)):
        check(c, given(c, 3))


OTHERS = {
    "gelu": case("gelu", f32("T", 33), tanh=False),
    "gelu_tanh": case("gelu", f32("T", 33), tanh=True),
    "scalar": case("mul", f32("T", 5), scalar=2.5),
    "reversed": case("sub", f32("T", 5), scalar=1, reversed=True),
    "cube": case("pow", f32("T", 5), scalar=3.0),
    "column": case("add", f32("T", 3, 1), f32("T", 3, 21)),
    "weight": case("mul", f32("T", 3, 21), f32(21)),
    "heads": case("mul", f32("T", 3, 21), f32(3, 1)),
    "middle": case("add", f32("T", 2, 1, 5), f32("T", 2, 3, 5)),
    "one row": case("add", f32("T", 4), f32(1, 4)),
    "vector": case("add", f32("T"), f32("T")),
    "wide": case("add", f32("T", 1500), f32("T", 1500)),
    "large number": case("add", i32("T"), scalar=2**24 + 1),
    "where ints": case("where", f32("T", 37), i32("T", 37), i32("T", 1)),
    "to float": case("cast", i32("T"), dtype="f32"),
    "to int": case("cast", f32("T", 3), dtype="i32"),
    "concat": case("concat", f32("T", 3, 4), f32("T", 3, 1), f32("T", 3, 18, layout="strides:60,20"), axis=2),
    "concat heads": case("concat", f32("T", 1, 5), f32("T", 2, 5), axis=1),
    "concat below": case("concat", f32(2, 5), f32(3, 5), axis=0),
    "copy": case("copy", f32("T", 3, 18, layout="strides:60,20")),
    "copy ints": case("copy", i32("T", 3)),
    "expand": case("expand", f32("T", 1, 5), shape=(-1, 4, 5)),
    "transpose": case("transpose", f32("T", 2, 3, 5), perm=(0, 3, 1, 2)),
    "chain": case(
        "fused",
        f32("T", 3, 21, layout="strides:80,21"),
        f32("T", 3, 1),
        f32(21),
        code="mul(i0,0.5);gelu_tanh(t0);gt(t1,i1);where(t2,t1,-1e-05);maximum(t3,i2);gelu(t4);silu(t5);sub(1.0,t6)",
    ),
    "numbers": case("fused", f32("T", 5), code="maximum(i0,-inf);minimum(t0,inf);where(1.0,t1,nan)"),
    "first is a weight": case("fused", f32(5), f32("T", 5), code="add(i0,i1);tanh(t0);pow(t1,2.0);pow(2.0,t2)"),
    "eight inputs": case(
        "fused",
        *(f32("T", 7),) * 8,
        code=";".join(
            ["add(i0,i1)", "sub(t0,i2)", "mul(t1,i3)", "add(t2,i4)", "sub(t3,i5)", "maximum(t4,i6)", "minimum(t5,i7)"]
        ),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("tokens", [1, 9])
def test_others(name: str, tokens: int) -> None:
    c = OTHERS[name]
    rounded = name in ("gelu", "gelu_tanh", "cube", "chain", "first is a weight")
    check(c, given(c, tokens), 1e-5 if rounded else 0.0, absolute=1e-6 if rounded else 0.0)


def test_a_first_axis_that_is_new() -> None:
    c = case("expand", f32(1, 5), shape=(-1, 5), rows="T")
    x = np.arange(5, dtype=np.float32)[None]
    launches = made(c, 90, 4)
    assert launches[0].grid == (1, 1, 1)
    ids = case("add", f32("T", 5), f32(1, 5))  # what a reader of the rows sees
    check(ids, [np.zeros((4, 5), np.float32), x])


def test_elements_of_bytes_are_moved() -> None:
    c = case("copy", tensor("f8e4m3", "T", 12))
    x = np.arange(-24, 24, dtype=np.float32).reshape(4, 12).astype(ml_dtypes.float8_e4m3fn)
    (got,) = run(c, [x], 80)
    np.testing.assert_array_equal(got.view(np.uint8), x.view(np.uint8))


@pytest.mark.parametrize("op", ["exp", "add"])
def test_in_place(op: str) -> None:
    c = case(op, *(f32("T", 300),) * (2 if op == "add" else 1))
    check(c, given(c, 5), 1e-5, inplace=True)


def test_what_no_kernel_takes_is_refused_by_name() -> None:
    with pytest.raises(PlancError, match=r"div at top level has no kernel on sm_90 .*kernels of div: floats, in any"):
        made(case("div", i32("T", 3), i32("T", 3)), 90, 1)
    with pytest.raises(PlancError, match="no kernels for sm_75; kernels are made for sm_80"):
        made(case("exp", f32("T", 3)), 75, 1)
