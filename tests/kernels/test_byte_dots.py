"""Products of bytes by AVX-VNNI: those of AVX512-VNNI to the bit, whatever the step.

A CPU that has AVX512-VNNI alone runs the same kernels with that encoding of their one instruction.
"""

from dataclasses import replace

import numpy as np
import pytest

from planc.codegen.cpu_blocking import constants
from planc.plans.host import CPU_FLAGS, cpu_flags, missing_flags
from planc.plans.tuning import Blocking
from tests.kernels.harness import Library, assert_same_bits
from tests.kernels.test_gated import apart, coded
from tests.kernels.test_schemes import arrays, check_close, check_same_bits, experts, linear

TARGET, OTHER = "cpu:x86-64-v3+avxvnni", "cpu:x86-64-v4+vnni"
ROWS = (1, 2, 3, 4, 5, 6, 7, 13, 63, 64, 193, 200)
TUNED = constants(Blocking(chunk_rows=50, panel_from=5, tile_rows=6))
GATED = coded("int8-wo", 70, "silu", half=64)
PRODUCTS = {
    "int8": linear("int8", 65, 2100, bias=True),
    "int8-wo": linear("int8-wo", 130, 518, x="strides:600"),
    "int8-wo, tuned": replace(linear("int8-wo", 130, 518), tuned=TUNED),
    "int4-wo-g64": linear("int4-wo-g64", 65, 576),
    "awq-g32": linear("awq-g32", 65, 320),
    "int4-g32": linear("int4-g32", 65, 2112, x="strides:2176"),
    "mxfp4": linear("mxfp4", 65, 96),
    "q8_0": linear("q8_0", 65, 608),
    "experts, int8": experts("int8", 3, 65, 37, 2),
    "gated, int8-wo": GATED,
}
CASES = [*PRODUCTS.values(), *apart(GATED)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    macro = "PLANC_EVEX_DOTS" if missing_flags(TARGET) else ""
    if macro and not cpu_flags().issuperset((*CPU_FLAGS["vnni"], "avx512vl")):
        pytest.skip("this CPU has neither AVX-VNNI nor AVX512-VNNI")
    return Library(CASES, TARGET, tmp_path_factory.mktemp("kernels"), macro)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Library:
    if missing_flags(OTHER):
        pytest.skip("this CPU lacks AVX512-VNNI")
    return Library(list(PRODUCTS.values()), OTHER, tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("name", PRODUCTS)
def test_close_to_the_reference(library: Library, name: str) -> None:
    c = PRODUCTS[name]
    check_close(library, c, 200, 2e-5 if c is GATED else 3e-6, name)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_row_has_the_same_bits_in_every_step(library: Library, name: str) -> None:
    check_same_bits(library, PRODUCTS[name], ROWS, name)


@pytest.mark.parametrize("name", PRODUCTS)
def test_bits_are_those_of_avx512(library: Library, other: Library, name: str) -> None:
    c = PRODUCTS[name]
    for rows in (5, 200):
        given = arrays(c, rows)
        assert_same_bits(library.run(c, given, rows)[0], other.run(c, given, rows)[0], f"{name}, {rows} rows")


def test_codes_times_codes_are_summed_exactly(library: Library) -> None:
    c = PRODUCTS["int8"]
    for rows in (3, 80):
        given = arrays(c, rows)
        x, row_scales, q, s, bias = given
        total = x.astype(np.int64) @ q.astype(np.int64).T
        assert_same_bits(library.run(c, given, rows)[0], total.astype(np.float32) * (row_scales[:, None] * s) + bias)


def test_the_bits_of_product_and_gate(library: Library) -> None:
    product, act = apart(GATED)
    for rows in (1, 7, 64):
        given = arrays(GATED, rows)
        (wide,) = library.run(product, given, rows)
        (want,) = library.run(act, [np.ascontiguousarray(half) for half in np.split(wide, 2, axis=-1)], rows)
        assert_same_bits(library.run(GATED, given, rows, threads=3)[0], want, f"{rows} rows")
