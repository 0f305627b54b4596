"""What rounds the rows it makes writes the bits of the two kernels one after the other."""

import numpy as np
import pytest

from tests.kernels.harness import TARGETS, Case, Library, apart, assert_same_bits, case, f32, i32, random
from tests.kernels.test_quantize_rows import given

I8, F8 = {"dtype": "i8"}, {"dtype": "f8e4m3"}
ROW, ROWS, WIDE = f32(50), f32("T", 3, 50), f32("T", 3, 50, layout="strides:200,64")
BOTH = [
    case("rms_norm_quantize", f32("T", 576), f32(576), eps=1e-5, hadamard=64, **I8),
    case("layer_norm_quantize", WIDE, ROW, ROW, i32(19), eps=1e-5, bias=True, **F8),
    case("add_rms_norm_quantize", WIDE, ROWS, ROW, ROW, eps=1e-5, shift=True, hadamard=2, **I8),
    case("add_layer_norm_quantize", ROWS, ROWS, ROW, ROW, i32(3), eps=1e-5, shift=True, **F8),
    case("act_mul_quantize", f32("T", 70, layout="strides:140"), f32("T", 70), act="silu", **I8),
    case("add_rms_norm_quantize", f32("T", 192), f32("T", 192), f32(192), eps=1e-5, group=64, **I8),
    case("act_mul_quantize", WIDE, WIDE, ROW, act="gelu_tanh", shift=True, **F8),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """For one target: what rows go through is tested on all."""
    cases = [*BOTH, *(part for c in BOTH for part in apart(c))]
    return Library(cases, TARGETS[-1], tmp_path_factory.mktemp("kernels"))


def arrays(c: Case, rows: int) -> list[np.ndarray]:
    """Rows, of which one is zeros; parameters, a shift, features."""
    made = []
    for i, t in enumerate(c.types):
        if t.shape[0] != "T":
            made.append(given(t, int(c.types[0].shape[-1])))
            continue
        made.append(random(rows, *(int(d) for d in t.shape[1:]), seed=i, scale=3))
        made[-1][1:2] = 0
    return made


@pytest.mark.parametrize("c", BOTH, ids=str)
def test_the_bits_of_both_kernels(library: Library, c: Case) -> None:
    first, second = apart(c)
    whole, count = arrays(c, 9), len(first.types)
    for rows, threads in ((9, 1), (9, 4), (1, 3)):
        now = [a[:rows] if t.shape[0] == "T" else a for a, t in zip(whole, c.types, strict=True)]
        made, *others = library.run(first, now[:count], rows)
        want = (*others, *library.run(second, [made, *now[count:]], rows))
        got = library.run(c, now, rows, threads=threads)
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            assert_same_bits(g, w, f"{c}, {rows} rows, {threads} threads")
        assert len(np.unique(got[-2].view(np.uint8))) > 10
