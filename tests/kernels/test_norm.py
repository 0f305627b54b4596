"""Norms and rotary embedding: widths around the vector, views of fused projections, parameters present or not."""

import numpy as np
import pytest

from planc.compiler.ir.ops import OPS
from tests.kernels.harness import Case, Library, assert_close, assert_same_bits, case, f32, i32, random

CASES = [
    *(case("rms_norm", f32("T", d), f32(d), eps=1e-5) for d in (1, 15, 64, 70, 200)),
    case("rms_norm", f32("T", 3, 20, layout="strides:130,24"), f32(20), eps=1e-6),
    case("rms_norm", f32("T", 33), eps=1e-5),
    case("layer_norm", f32("T", 70), f32(70), f32(70), eps=1e-5, bias=True),
    case("layer_norm", f32("T", 2, 17, layout="strides:50,18"), f32(17), eps=1e-5),
    case("layer_norm", f32("T", 64), eps=1e-5),
    case("add_rms_norm", f32("T", 70), f32("T", 70, layout="strides:90"), f32(70), eps=1e-5),
    case("add_layer_norm", f32("T", 70), f32("T", 70), f32(70), f32(70), eps=1e-5, bias=True),
    *(
        case("rotary", f32("T", 3, d, layout=layout), f32(50, half), f32(50, half), i32("T"), interleaved=inter)
        for d, half, layout in ((16, 8, "row"), (80, 20, "strides:400,96"), (6, 3, "row"))
        for inter in (False, True)
    ),
]


def arrays(c: Case, rows: int) -> list[np.ndarray]:
    positions = (np.arange(rows, dtype=np.int32) * 7 + 3) % 50
    return [
        positions if t.dtype == "i32" else random(*(rows if d == "T" else int(d) for d in t.shape), seed=i) + 0.5
        for i, t in enumerate(c.types)
    ]


@pytest.mark.parametrize("c", CASES, ids=str)
def test_close_to_float64(library: Library, c: Case) -> None:
    given = arrays(c, 7)
    wide = [g.astype(np.float64) if g.dtype == np.float32 else g for g in given]
    want = OPS[c.op].ref(dict(c.attrs), wide, c.types)
    got = library.run(c, given, 7)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, 1e-6, c)


@pytest.mark.parametrize("c", CASES, ids=str)
def test_rows_and_threads_change_no_bit(library: Library, c: Case) -> None:
    given = arrays(c, 7)
    whole = library.run(c, given, 7)
    for rows, threads in ((1, 1), (1, 3), (7, 2), (7, 4)):
        some = [g[:rows] if t.shape[0] == "T" else g for g, t in zip(given, c.types, strict=True)]
        for got, want in zip(library.run(c, some, rows, threads=threads), whole, strict=True):
            assert_same_bits(got, want[:rows], c)


@pytest.mark.parametrize("at", [3, 7])
def test_norm_in_place(library: Library, at: int) -> None:
    c = CASES[at]
    given = arrays(c, 5)
    assert_same_bits(library.run(c, given, 5, inplace=True)[0], library.run(c, given, 5)[0], c)
