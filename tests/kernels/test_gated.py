"""Gated products: the bits of the product and of act_mul over its halves, in every format, for any number of rows."""

import numpy as np
import pytest

from planc.codegen.target import parse
from planc.compiler.ir import gated
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.types import DTYPES, TensorType
from planc.errors import PlancError
from tests.kernels.harness import Case, Library, assert_close, assert_same_bits, case, f32, random, tensor
from tests.kernels.test_schemes import arrays as scheme_arrays
from tests.kernels.test_schemes import parts, rows_types

NIGHTLY = ("cpu:portable", "cpu:x86-64-v4")  # see conftest.py

ROWS = (1, 2, 5, 7, 23, 24, 65, 193, 300)
HALF = 128


def plain(dtype: str, k: int, act: str, *, half: int = HALF, bias: bool = False, x: str = "row") -> Case:
    w = tensor(dtype, 2 * half, k, layout={"f32": "n64", "bf16": "n64k2"}[dtype])
    more = {"bias": True} if bias else {}
    return case("linear_act_mul", f32("T", k, layout=x), w, *([f32(2 * half)] if bias else []), act=act, **more)


def coded(name: str, k: int, act: str, *, half: int = HALF, bias: bool = False) -> Case:
    types = [*rows_types(name, "T", k), *parts(name, 2 * half, k), *([f32(2 * half)] if bias else [])]
    return case("qlinear_act_mul", *types, scheme=name, act=act, **({"bias": True} if bias else {}))


GATED = {
    "f32": plain("f32", 37, "silu", bias=True),
    "f32, k cut": plain("f32", 700, "relu"),
    "bf16": plain("bf16", 70, "gelu", x="strides:150"),
    "bf16, k cut": plain("bf16", 1600, "silu", half=64, bias=True),
    "int8": coded("int8", 518, "silu", half=192),
    "int8, k cut": coded("int8", 2100, "gelu_tanh", half=64),
    "int8-wo": coded("int8-wo", 576, "silu"),
    "fp8": coded("fp8", 130, "gelu_tanh", bias=True),
    "fp8-block, k cut": coded("fp8-block", 1664, "silu", half=64),
    "int4-wo-g64": coded("int4-wo-g64", 576, "silu"),
    "awq-g32, k cut": coded("awq-g32", 2112, "silu", half=64, bias=True),
    "int4-g64": coded("int4-g64", 192, "silu", half=64, bias=True),
    "mxfp4": coded("mxfp4", 96, "relu2"),
    "q4_1": coded("q4_1", 192, "silu", half=64),
    "q8_0, k cut": coded("q8_0", 2112, "silu", half=64, bias=True),
}


def apart(c: Case) -> tuple[Case, Case]:
    product, gate, _, act = gated.parts(c.node)
    return Case(product.op, c.types, product.attrs), Case("act_mul", (gate.out.type,) * 2, act.attrs)


CASES = [*GATED.values(), *(part for c in GATED.values() for part in apart(c))]


def arrays(c: Case, rows: int) -> list[np.ndarray]:
    if c.op.startswith("q"):
        return scheme_arrays(c, rows)
    dims = [tuple(rows if d == "T" else int(d) for d in t.shape) for t in c.types]
    made = [random(*shape, seed=i, scale=0.1 if i else 1.0) for i, shape in enumerate(dims)]
    return [made[0], made[1].astype(DTYPES[c.types[1].dtype]), *made[2:]]


def cut(c: Case, given: list[np.ndarray], rows: int) -> list[np.ndarray]:
    return [a[:rows] if t.shape[0] == "T" else a for a, t in zip(given, c.types, strict=True)]


@pytest.mark.parametrize("name", GATED)
def test_the_bits_of_product_and_gate(library: Library, name: str) -> None:
    c = GATED[name]
    product, act = apart(c)
    given = arrays(c, max(ROWS))
    for rows in ROWS:
        some = cut(c, given, rows)
        (wide,) = library.run(product, some, rows)
        half = wide.shape[-1] // 2
        (want,) = library.run(act, [np.ascontiguousarray(wide[:, :half]), np.ascontiguousarray(wide[:, half:])], rows)
        for threads in (1, 3):
            (got,) = library.run(c, some, rows, threads=threads)
            assert_same_bits(got, want, f"{name}, {rows} rows, {threads} threads")


@pytest.mark.parametrize("name", GATED)
def test_close_to_the_reference(library: Library, name: str) -> None:
    c = GATED[name]
    given = arrays(c, 30)
    (got,) = library.run(c, given, 30)
    exact = [library.multiplied(c, given[0]), *given[1:]]
    (want,) = OPS[c.op].ref(dict(c.attrs), exact, [TensorType(t.dtype, t.shape) for t in c.types])
    assert_close(got, want, 2e-5, name)


def test_halves_that_share_a_block_have_no_kernel() -> None:
    target = parse("cpu:x86-64-v3")
    with pytest.raises(PlancError, match="64"):
        plain("f32", 32, "silu", half=96).kernel(target)
    assert plain("f32", 32, "silu").kernel(target).name != plain("f32", 32, "relu").kernel(target).name


def test_odd_columns_are_no_two_halves() -> None:
    with pytest.raises(ValueError, match="two halves"):
        OPS["linear_act_mul"].infer({"act": "silu"}, [f32("T", 8), f32(3, 8)])
