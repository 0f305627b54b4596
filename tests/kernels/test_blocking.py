"""Blockings of products: a kernel that was tuned has another name and the same bits, whatever the number of rows."""

from collections.abc import Iterator
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from planc.codegen.cpu_blocking import constants, product_of, variants
from planc.codegen.target import parse
from planc.compiler.ir.types import DTYPES, PACKED_FOR
from planc.plans.tuning import Blocking
from tests.kernels.harness import Case, Library, assert_same_bits, case, f32, i32, random, tensor

NIGHTLY = ("cpu:x86-64-v4",)  # see conftest.py
N, K = 130, 1100  # of which a panel takes less than all
ROWS = (7, 20, 200)
OTHER = Blocking(chunk_rows=50, panel_from=5, tile_rows=3)


def weight(dtype: str, *shape: int):
    return tensor(dtype, *shape, layout=PACKED_FOR[dtype])


SCALES = tensor("bf16", 9, N)
DEFAULTS = [
    case("linear", f32("T", K), weight("f32", N, K)),
    case("linear", f32("T", K), weight("bf16", N, K)),
    case("qlinear", f32("T", K), weight("i8", N, K), f32(N), scheme="int8-wo"),
    case("qlinear", tensor("i8", "T", K), f32("T"), weight("i8", N, K), f32(N), scheme="int8"),
    case("qlinear", tensor("f8e4m3", "T", K), f32("T"), weight("f8e4m3", N, K), f32(N), scheme="fp8"),
    case("qlinear", f32("T", 1152), weight("u4", N, 1152), f32(9, N), f32(9, N), scheme="awq"),
    case("qlinear", tensor("i8", "T", 1152), f32("T", 9), weight("u4", N, 1152), SCALES, SCALES, scheme="int4"),
    case("expert_linear", f32("T", K), i32("T", 1), weight("f32", 2, N, K)),
]


def cuts(c: Case) -> Iterator[Blocking]:
    """All choices at once, and the smallest panel where it is free."""
    product = product_of(c.node, c.types)
    assert product is not None
    free = any(b.panel_k for b in variants(product))
    yield replace(OTHER, panel_k=256) if free else OTHER


TUNED = {c: [replace(c, tuned=constants(b)) for b in cuts(c)] for c in DEFAULTS}
CASES = [*DEFAULTS, *(t for found in TUNED.values() for t in found)]


def arrays(c: Case, rows: int) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    for i, t in enumerate(c.types):
        shape = tuple(rows if d == "T" else int(d) for d in t.shape)
        if t.dtype == "i32":
            found.append((np.arange(rows, dtype=np.int32) % 3 % 2).reshape(shape))
        elif t.dtype in ("i8", "u4"):
            found.append(np.random.default_rng(i).integers(0, 16, shape).astype(DTYPES[t.dtype]))
        else:
            found.append(random(*shape, seed=i).astype(ml_dtypes.bfloat16).astype(DTYPES[t.dtype]))
    return found


@pytest.mark.parametrize("c", DEFAULTS, ids=str)
def test_tuned_kernels_have_the_same_bits(library: Library, c: Case) -> None:
    given = arrays(c, max(ROWS))
    cut_rows = {i for i, t in enumerate(c.types) if t.shape[0] == "T"}
    for tuned in TUNED[c]:
        assert tuned.kernel(library.target).name != c.kernel(library.target).name
        for rows in ROWS:
            some = [a[:rows] if i in cut_rows else a for i, a in enumerate(given)]
            (want,), (got,) = library.run(c, some, rows), library.run(tuned, some, rows, threads=3)
            assert_same_bits(got, want, f"{c}, {tuned.tuned}, {rows} rows")


def test_an_untuned_kernel_keeps_its_name() -> None:
    c, target = DEFAULTS[1], parse("cpu:x86-64-v3")
    assert c.kernel(target).name == f"planc_linear_bf16_n{N}_k{K}_xstride{K}_inner1_bias0"
    assert replace(c, tuned=constants(Blocking())).kernel(target) == c.kernel(target)
    tuned = replace(c, tuned=constants(Blocking(tile_rows=3, panel_k=256))).kernel(target)
    assert tuned.name == f"{c.kernel(target).name}_panelk256_tilerows3"
