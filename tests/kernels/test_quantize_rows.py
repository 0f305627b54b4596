"""quantize_rows: codes and scales are those of the reference, bit by bit, for rows of any size."""

import numpy as np
import pytest

from planc.compiler.ir.ops import OPS
from planc.compiler.ir.types import TensorType
from tests.kernels.harness import Case, Library, assert_same_bits, case, f32, i32, random


def quantize(dtype: str, *shape: int | str, layout: str = "row", **attrs: int) -> Case:
    return case("quantize_rows", f32(*shape, layout=layout), dtype=dtype, **attrs)


CASES = [
    *(quantize(d, "T", 37) for d in ("i8", "f8e4m3")),
    quantize("i8", "T", 3, 64),
    quantize("f8e4m3", "T", 2, 50, layout="strides:200,80"),
    quantize("i8", "T", 1),
    quantize("i8", "T", 576, group=64),
    quantize("i8", "T", 2, 96, layout="strides:400,128", group=32),
    quantize("i8", "T", 256, hadamard=4, group=128),
    quantize("i8", "T", 576, hadamard=64),
    quantize("i8", "T", 3, 50, layout="strides:200,64", hadamard=2),
    *(quantize("i8", "T", 16 * h + 8 * h, hadamard=h) for h in (4, 8, 128)),
    case("quantize_rows", f32("T", 37), f32(37), dtype="f8e4m3"),
    case("quantize_rows", f32("T", 3, 50, layout="strides:200,64"), f32(50), dtype="i8", hadamard=2),
    case("quantize_rows", f32("T", 37), i32(1), dtype="f8e4m3"),
    case("quantize_rows", f32("T", 3, 50, layout="strides:200,64"), f32(50), i32(19), dtype="f8e4m3"),
]


def rows_of(c: Case, rows: int) -> np.ndarray:
    """Rows of every size, one of zeros, one whose scale rounds to zero, ties between codes."""
    x = random(rows, *(int(d) for d in c.types[0].shape[1:]), seed=5)
    x *= np.float32(10.0) ** np.linspace(-30, 30, rows, dtype=np.float32).reshape(-1, *[1] * (x.ndim - 1))
    x[1] = 0
    x[3] = np.float32(1e-44)
    x[4] = np.round(x[4] / np.abs(x[4]).max() * 254) / 2
    return x


def given(t: TensorType, k: int) -> np.ndarray:
    """A shift, or some of the features."""
    if t.dtype == "f32":
        return random(k)
    return np.sort(np.random.default_rng(3).permutation(k)[: int(t.shape[0])]).astype(np.int32)


@pytest.mark.parametrize("c", CASES, ids=str)
def test_the_bits_of_the_reference(library: Library, c: Case) -> None:
    x, rest = rows_of(c, 40), [given(t, int(c.types[0].shape[-1])) for t in c.types[1:]]
    want = OPS[c.op].ref(dict(c.attrs), [x, *rest], c.types)
    for rows, threads in ((40, 1), (40, 3), (1, 2), (7, 9)):
        got = library.run(c, [x[:rows], *rest], rows, threads=threads)
        for part, g, w in zip(("codes", "scales"), got, want, strict=True):
            assert_same_bits(g, w[:rows], f"{c}, {part}, {rows} rows, {threads} threads")


@pytest.mark.parametrize("c", CASES[:2], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_holds_no_number_says_so(library: Library, c: Case, bad: float) -> None:
    x = random(3, 37)
    x[1, 20] = bad
    _, scales = library.run(c, [x], 3)
    assert np.isnan(scales[1])
    assert np.isfinite(scales[[0, 2]]).all()
