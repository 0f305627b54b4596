"""Vectors on CUDA: norms, rotary, tables, rows to 8 bits and ops along the last axis, with views, ties and NaN."""

import ml_dtypes
import numpy as np
import pytest

from planc.compiler.ir.ops import OPS
from planc.compiler.ir.types import TensorType
from planc.errors import PlancError
from tests.codegen.cuda.harness import made, reference, run
from tests.codegen.cuda.test_dense import weight_parts, weight_types
from tests.kernels.harness import Case, apart, case, f32, i32, random, tensor

Array = np.ndarray
VIEW = f32("T", 3, 19, layout="strides:80,21")
NORMS = [
    *(case("rms_norm", f32("T", d), f32(d), eps=1e-5) for d in (1, 15, 64, 1500)),
    case("rms_norm", f32("T", 3, 20, layout="strides:130,24"), f32(20), eps=1e-6),
    case("rms_norm", f32("T", 33), eps=1e-5),
    case("layer_norm", f32("T", 70), f32(70), f32(70), eps=1e-5, bias=True),
    case("layer_norm", f32("T", 2, 17, layout="strides:50,18"), f32(17), eps=1e-5),
    case("add_rms_norm", f32("T", 70), f32("T", 70, layout="strides:90"), f32(70), eps=1e-5),
    case("add_layer_norm", f32("T", 70), f32("T", 70), f32(70), f32(70), eps=1e-5, bias=True),
    *(
        case("rotary", f32("T", 3, d, layout=layout), f32(50, half), f32(50, half), i32("T"), interleaved=inter)
        for d, half, layout in ((16, 8, "row"), (80, 20, "strides:400,96"), (6, 3, "row"))
        for inter in (False, True)
    ),
]


def normal(c: Case, tokens: int) -> list[Array]:
    positions = (np.arange(tokens, dtype=np.int32) * 7 + 3) % 50
    return [
        positions if t.dtype == "i32" else random(*(tokens if d == "T" else int(d) for d in t.shape), seed=i) + 0.5
        for i, t in enumerate(c.types)
    ]


@pytest.mark.parametrize("c", NORMS, ids=str)
def test_norms_and_rotary(c: Case) -> None:
    for tokens in (1, 7):
        given = normal(c, tokens)
        for got, want in zip(run(c, given, 90), reference(c, given), strict=True):
            np.testing.assert_allclose(got, want, rtol=3e-6, atol=3e-6)


def test_a_norm_in_place() -> None:
    c = case("rms_norm", f32("T", 70), f32(70), eps=1e-5)
    given = normal(c, 5)
    np.testing.assert_allclose(run(c, given, 90, inplace=True)[0], reference(c, given)[0], rtol=3e-6, atol=3e-6)


CLOSE = {
    **{op: case(op, VIEW) for op in ("sum", "mean", "amax", "amin", "softmax", "cumsum")},
    "prod": case("prod", f32("T", 70)),
    "softmax of one": case("softmax", f32("T", 1)),
    "softmax wide": case("softmax", f32("T", 2, 3, 2, 131)),
    "softmax in steps": case("softmax", f32("T", 4500)),
    "sum in steps": case("sum", f32("T", 9000)),
    "cumsum in steps": case("cumsum", f32("T", 4500)),
}
EXACT = {
    "argmax": case("argmax", VIEW),
    "argmax in steps": case("argmax", f32("T", 9000)),
    "top 4": case("topk", VIEW, k=4, largest=True),
    "bottom 4": case("topk", VIEW, k=4, largest=False),
    "top 1": case("topk", f32("T", 200), k=1, largest=True),
    "sorted": case("topk", f32("T", 19), k=19, largest=True),
    "sorted upwards": case("topk", f32("T", 2, 200), k=50, largest=False),
    "gather": case("gather", VIEW, i32("T", 3, 5)),
    "gather from one row": case("gather", f32(1, 1, 19), i32("T", 3, 5)),
    "gather by one row": case("gather", VIEW, i32("T", 1, 5)),
    "gather ints": case("gather", i32("T", 19), i32("T", 40)),
    "scatter": case("scatter", VIEW, i32("T", 3, 5), f32("T", 3, 5)),
    "scatter one": case("scatter", VIEW, i32("T", 3, 5), f32("T", 1, 1)),
    "scatter add": case("scatter", VIEW, i32("T", 3, 5), f32("T", 3, 5), add=True),
    "scatter a number": case("scatter", f32(1, 1, 19), i32("T", 3, 5), scalar=-1.5),
    "scatter wide": case("scatter", f32("T", 1500), i32("T", 5), f32("T", 5)),
}


def along(c: Case, tokens: int, special: bool) -> list[Array]:
    """Halves, so that ties abound; indices, a few of them outside of the axis."""
    out = []
    for i, t in enumerate(c.types):
        rng = np.random.default_rng(i)
        shape = [tokens if d == "T" else int(d) for d in t.shape]
        if t.dtype == "i32":
            out.append(rng.integers(-2, 21, shape).astype(np.int32))
            continue
        x = (rng.integers(-6, 7, shape) / 2).astype(np.float32) if special else random(*shape, seed=i, scale=3)
        if special and i == 0:
            x.flat[rng.integers(0, x.size, 8)] = [np.nan, np.inf, -np.inf, -0.0, 0.0, np.nan, np.inf, -np.inf]
        out.append(x)
    return out


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", [*CLOSE, *EXACT])
def test_along_the_last_axis(name: str, special: bool) -> None:
    c = (CLOSE | EXACT)[name]
    given = along(c, 5, special)
    with np.errstate(all="ignore"):
        want = OPS[c.op].ref(dict(c.attrs), given, c.types)
    for got, w in zip(run(c, given, 90), want, strict=True):
        assert got.dtype == w.dtype
        tolerance = 0.0 if name in EXACT else 5e-6
        np.testing.assert_allclose(got, w, rtol=tolerance, atol=tolerance * 60, err_msg=name)


@pytest.mark.parametrize("dtype", ["i8", "f8e4m3"])
@pytest.mark.parametrize("shape", [("T", 1), ("T", 100), ("T", 3, 2100)])
def test_rows_to_8_bits_are_the_references(dtype: str, shape: tuple[int | str, ...]) -> None:
    c = case("quantize_rows", f32(*shape), dtype=dtype)
    x = random(*(5 if d == "T" else int(d) for d in shape), scale=4)
    x[2] = 0
    for got, want in zip(run(c, [x], 90), reference(c, [x]), strict=True):
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize(("shape", "size"), [((3, 2), 2), ((576,), 64), ((3, 1664), 128), ((4096,), 128)], ids=str)
def test_rows_turn_before_they_are_rounded(shape: tuple[int, ...], size: int) -> None:
    c = case("quantize_rows", f32("T", *shape), dtype="i8", hadamard=size)
    x = random(5, *shape, scale=4)
    x[..., 1] *= 100
    x[2] = 0
    for got, want in zip(run(c, [x], 90), reference(c, [x]), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("dtype", "attrs"), [("f8e4m3", {}), ("i8", {"hadamard": 4})])
def test_rows_lose_their_shift_before_they_are_rounded(dtype: str, attrs: dict[str, int]) -> None:
    c = case("quantize_rows", f32("T", 3, 100), f32(100), dtype=dtype, **attrs)
    given = [random(5, 3, 100), random(100, seed=1, scale=9)]
    for got, want in zip(run(c, given, 90), reference(c, given), strict=True):
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("arch", [89, 90])
def test_outliers_have_their_second_digits_behind(arch: int) -> None:
    c = case("quantize_rows", f32("T", 3, 100), f32(100), i32(21), dtype="f8e4m3")
    outliers = np.sort(np.random.default_rng(3).permutation(100)[:21]).astype(np.int32)
    given = [random(5, 3, 100), random(100, seed=1, scale=9), outliers]
    given[0][2] = given[1]  # all zeros, once the shift is taken
    for got, want in zip(run(c, given, arch), reference(c, given), strict=True):
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


ROW, ROWS = f32(100), f32("T", 3, 100)
SOME = f32("T", 3, 100, layout="strides:700,104")
MADE = [
    case("rms_norm_quantize", ROWS, ROW, eps=1e-5, dtype="i8"),
    case("rms_norm_quantize", SOME, ROW, i32(21), eps=1e-5, shift=True, dtype="f8e4m3"),
    case("layer_norm_quantize", SOME, ROW, ROW, i32(21), eps=1e-5, bias=True, dtype="f8e4m3"),
    case("add_rms_norm_quantize", SOME, ROWS, ROW, eps=1e-5, dtype="f8e4m3"),
    case("add_layer_norm_quantize", ROWS, ROWS, ROW, i32(7), eps=1e-5, shift=True, dtype="f8e4m3"),
    case("act_mul_quantize", SOME, SOME, act="silu", dtype="i8"),
    case("act_mul_quantize", SOME, ROWS, ROW, act="relu2", shift=True, dtype="i8", hadamard=4),
    case("act_mul_quantize", f32("T", 2500), f32("T", 2500), i32(40), act="gelu_tanh", dtype="f8e4m3"),
    case("act_mul_quantize", SOME, ROWS, ROW, i32(21), act="relu2", shift=True, dtype="f8e4m3"),
]


def features(c: Case, tokens: int) -> list[Array]:
    """Inputs of rows that are made and rounded: the third row is zeros, integers are features."""
    rng = np.random.default_rng(3)
    made = []
    for i, t in enumerate(c.types):
        if t.dtype == "i32":
            made.append(np.sort(rng.permutation(100)[: int(t.shape[0])]).astype(np.int32))
            continue
        made.append(random(*(tokens if d == "T" else int(d) for d in t.shape), seed=i, scale=3))
        if t.shape[0] == "T":
            made[-1][2:3] = 0
    return made


@pytest.mark.parametrize("c", MADE, ids=str)
@pytest.mark.parametrize("tokens", [1, 5])
def test_rows_are_rounded_as_they_are_made(c: Case, tokens: int) -> None:
    """The bits of the two kernels one after the other."""
    first, second = apart(c)
    given, count = features(c, tokens), len(first.types)
    made, *others = run(first, given[:count], 90)
    want = (*others, *run(second, [made, *given[count:]], 90))
    for got, w in zip(run(c, given, 90), want, strict=True):
        np.testing.assert_array_equal(got.view(np.uint8), w.view(np.uint8))


def test_rows_that_turn_or_are_wide_are_made_apart() -> None:
    for c in (
        case("rms_norm_quantize", ROWS, ROW, eps=1e-5, dtype="i8", hadamard=4),
        case("rms_norm_quantize", f32("T", 16392), eps=1e-5, dtype="i8"),
    ):
        with pytest.raises(PlancError, match="has no kernel on sm_90"):
            made(c, 90, 1)


def test_rows_to_8_bits_of_a_view() -> None:
    c = case("quantize_rows", VIEW, dtype="i8")
    x = random(5, 3, 19)
    for got, want in zip(run(c, [x], 80), reference(c, [x]), strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(PlancError, match="quantize_rows at top level has no kernel on sm_80"):
        made(case("quantize_rows", VIEW, dtype="f8e4m3"), 80, 1)


IDS = np.array([3, 0, 49, 3, -1, 50], np.int32)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_embedding(dtype: str) -> None:
    table = random(50, 1100).astype(ml_dtypes.bfloat16 if dtype == "bf16" else np.float32)
    (got,) = run(case("embedding", tensor(dtype, 50, 1100), i32("T")), [table, IDS], 90)
    np.testing.assert_array_equal(got[:4], table[IDS[:4]].astype(np.float32))
    assert not got[4:].any(), "an id outside of the table gives zeros"


@pytest.mark.parametrize("name", ["int8", "fp8", "fp8-block", "awq", "int4-wo-g64", "mxfp4"])
def test_qembedding(name: str) -> None:
    parts = weight_parts(name, random(50, 256))
    c = Case("qembedding", (*weight_types(name, 50, 256), i32("T")), (("scheme", name),))
    (got,) = run(c, [*parts, IDS], 90)
    (want,) = reference(c, [*parts, IDS[:4]])
    np.testing.assert_array_equal(got[:4], want)
    assert not got[4:].any()


@pytest.mark.parametrize("x", [f32("T", 70), f32("T", 3, 20, layout="strides:130,20"), f32("T"), i32("T", 2)])
def test_take_rows(x: TensorType) -> None:
    c = case("take_rows", x, i32("R"))
    array = np.arange(6 * x.features).reshape(6, *x.shape[1:]).astype(np.float32 if x.dtype == "f32" else np.int32)
    given = [array, np.array([5, 0, 5], np.int32)]
    np.testing.assert_array_equal(run(c, given, 90)[0], reference(c, given)[0])


def test_weighted_sum() -> None:
    c = case("weighted_sum", f32("T", 4, 1100, layout="strides:5000,1200"), f32("T", 4, layout="strides:6"))
    given = [random(5, 4, 1100), random(5, 4, seed=1)]
    np.testing.assert_allclose(run(c, given, 90)[0], reference(c, given)[0], rtol=1e-5, atol=1e-5)


MATMULS = [
    (f32("T", 40), f32(40, 33)),
    (f32("T", 3, 18, 9), f32(9, 35)),
    (f32("T", 3, 5, 40), f32("T", 3, 40, 7)),
    (f32("T", 3, 5, 40, layout="strides:900,300,50"), f32(40, 70)),
    (f32("T", 1, 2, 9), f32(4, 9, 3)),
    (f32(2, 5, 6), f32("T", 1, 6, 8)),
]


@pytest.mark.parametrize(("a", "b"), MATMULS, ids=str)
@pytest.mark.parametrize("tokens", [1, 4])
def test_matmul(a: TensorType, b: TensorType, tokens: int) -> None:
    c = case("matmul", a, b)
    given = [random(*(tokens if d == "T" else int(d) for d in t.shape), seed=i) for i, t in enumerate((a, b))]
    np.testing.assert_allclose(run(c, given, 90)[0], reference(c, given)[0], rtol=1e-5, atol=1e-5)
