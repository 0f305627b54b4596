"""qlinear, qexpert_linear and qembedding in every scheme: close to the reference, equal bits in every step."""

import numpy as np
import pytest

from planc.codegen.target import parse
from planc.compiler.ir.operands import operands, scales_type
from planc.compiler.ir.ops import OPS
from planc.compiler.ir.quant import scheme
from planc.compiler.ir.types import DTYPES, PACKED_FOR, TensorType
from planc.errors import PlancError
from tests.kernels.harness import Case, Library, assert_close, assert_same_bits, case, f32, i32, tensor

NIGHTLY = ("cpu:x86-64-v4",)  # see conftest.py

ROWS = (1, 2, 3, 5, 6, 7, 13, 23, 24, 48, 193, 300)
IDS = np.array([0, 63, 64, 65, 127, 128, 129, 0, -1, 130], np.int32)


def parts(name: str, *shape: int, layout: str | None = None, held: bool = False) -> list[TensorType]:
    row, w = scheme(name), TensorType("f32", shape)
    codes = tensor(row.codes, *shape, layout=layout or PACKED_FOR[row.codes])
    return [codes, *(row.part_type(w, p, held=held) for p in row.parts[1:])]


def rows_types(name: str, *shape: int | str, layout: str = "row") -> list[TensorType]:
    row = scheme(name)
    x = tensor(row.act or "f32", *shape, layout=layout)
    return [x, scales_type(x, row.rows_group)] if row.act else [x]


def linear(
    name: str, n: int, k: int, *, bias: bool = False, x: str = "row", inner: int = 0, held: bool = False
) -> Case:
    given = rows_types(name, *(("T", inner, k) if inner else ("T", k)), layout=x)
    more = {"bias": True} if bias else {}
    return case("qlinear", *given, *parts(name, n, k, held=held), *([f32(n)] if bias else []), scheme=name, **more)


def experts(name: str, e: int, n: int, k: int, slots: int, *, bias: bool = False, apart: bool = False) -> Case:
    x, *row_scales = rows_types(name, *(("T", slots, k) if apart else ("T", k)))
    more = {"bias": True} if bias else {}
    types = [x, *row_scales, i32("T", slots), *parts(name, e, n, k), *([f32(e, n)] if bias else [])]
    return case("qexpert_linear", *types, scheme=name, **more)


def embedding(name: str, layout: str | None = None) -> Case:
    return case("qembedding", *parts(name, 130, 96, layout=layout), i32("T"), scheme=name)


LINEAR = {
    "int8": linear("int8", 65, 3),
    "int8, strided rows, bias": linear("int8", 130, 518, bias=True, x="strides:600"),
    "int8, inner": linear("int8", 64, 70, inner=3),
    "fp8": linear("fp8", 130, 518),
    "fp8, whole panels": linear("fp8", 64, 512),  # which gcc 12 once took for rows of a negative length
    "fp8-block": linear("fp8-block", 130, 518, bias=True),
    "int4-wo-g64": linear("int4-wo-g64", 130, 576, bias=True),
    "awq-g32": linear("awq-g32", 65, 320),
    "awq": linear("awq", 96, 384, x="strides:400"),
    "awq-g64, scales of a checkpoint": linear("awq-g64", 130, 576, held=True),
    "int4-wo-g32, scales of a checkpoint": linear("int4-wo-g32", 65, 2112, held=True),
    "int4-g32": linear("int4-g32", 65, 2112, bias=True, x="strides:2176"),
    "int4": linear("int4", 130, 2304),
    "mxfp4": linear("mxfp4", 65, 96),
    "q4_1": linear("q4_1", 130, 576, bias=True),
    "q8_0": linear("q8_0", 65, 608, x="strides:640"),
    "q6_k": linear("q6_k", 130, 2304),
}
EXPERTS = {
    "experts, int8": experts("int8", 4, 70, 37, 2, bias=True, apart=True),
    "experts, fp8-block": experts("fp8-block", 3, 65, 200, 2),
    "experts, awq-g32": experts("awq-g32", 5, 130, 64, 2),
    "experts, int4-g32": experts("int4-g32", 3, 65, 96, 2, apart=True),
    "experts, mxfp4": experts("mxfp4", 4, 65, 96, 3, bias=True),
    "experts, q4_1": experts("q4_1", 3, 65, 96, 2),
    "experts, q8_0": experts("q8_0", 3, 70, 64, 2, bias=True),
}
EMBEDDINGS = {
    **{
        f"embedding, {n}": embedding(n)
        for n in ("int8", "fp8", "fp8-block", "int4-wo-g32", "awq-g32", "int4-g32", "mxfp4")
    },
    **{f"embedding, {n}": embedding(n) for n in ("q4_1", "q8_0", "q6_k")},
    **{f"embedding, {n}, row-major": embedding(n, "row") for n in ("fp8", "fp8-block", "q8_0")},
}
PRODUCTS = LINEAR | EXPERTS
CASES = PRODUCTS | EMBEDDINGS


def codes(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Any codes that a scheme may hold; f8e4m3 without NaN, with subnormal numbers and zeros of both signs."""
    if dtype == "u4":
        return rng.integers(0, 16, shape).astype(np.uint8)
    if dtype == "i8":
        return rng.integers(-127, 128, shape).astype(np.int8)
    bits = rng.integers(0, 256, shape).astype(np.uint8)
    return np.where(bits & 0x7F == 0x7F, bits ^ 1, bits).astype(np.uint8).view(DTYPES["f8e4m3"])


def arrays(c: Case, tokens: int, seed: int = 0) -> list[np.ndarray]:
    """The fourth row is zero. Ids of experts lean to the first, and some are none."""
    rng = np.random.default_rng(seed)
    made = []
    names = inputs(c)
    for i, t in enumerate(c.types):
        shape = tuple(tokens if d == "T" else int(d) for d in t.shape)
        if t.dtype == "i32":
            e = int(c.types[names.index("q")].shape[0])
            made.append(np.where(rng.random(shape) < 0.4, 0, rng.integers(-1, e + 1, shape)).astype(np.int32))
        elif t.dtype in ("i8", "u4", "f8e4m3"):
            made.append(codes(t.dtype, shape, rng))
        elif names[i] == "z":
            whole = scheme(str(dict(c.attrs)["scheme"])).whole
            zeros = rng.integers(0, 16, shape) if whole else rng.uniform(-4, 20, shape)
            made.append(zeros.astype(DTYPES[t.dtype]))
        else:
            positive = names[i] == "row_scales" or scheme(str(dict(c.attrs)["scheme"])).act
            values = rng.standard_normal(shape).astype(np.float32)
            made.append((np.abs(values) + np.float32(0.01) if positive else values).astype(DTYPES[t.dtype]))
    if tokens > 3 and c.op != "qembedding":
        made[0][3] = 0
        if "row_scales" in names:
            made[1][3] = 0
    return made


def inputs(c: Case) -> list[str]:
    """What each input of a case is."""
    names = ["q", *scheme(str(dict(c.attrs)["scheme"])).parts[1:]]
    if c.op == "qembedding":
        return [*names, "ids"]
    given = operands(dict(c.attrs), range(len(c.types)), c.op == "qexpert_linear")
    head = ["x", *(["row_scales"] if given.row_scales else []), *(["ids"] if given.ids else [])]
    return [*head, *names, *(["bias"] if given.others else [])]


def reference(c: Case, given: list[np.ndarray]) -> np.ndarray:
    dense = [tensor(t.dtype, *t.shape) for t in c.types]
    wide = [given[0].astype(np.float64), *given[1:]] if c.types[0].dtype == "f32" else given
    return OPS[c.op].ref(dict(c.attrs), wide, dense)[0]


def some(c: Case, given: list[np.ndarray], rows: np.ndarray | slice) -> list[np.ndarray]:
    return [g[rows] if t.shape[0] == "T" else g for g, t in zip(given, c.types, strict=True)]


def check_close(library: Library, c: Case, most: int, bound: float, name: str) -> None:
    """One row, and the most, are within the bound of the reference."""
    for seed, rows in ((1, 1), (2, most)):
        given = arrays(c, rows, seed)
        (y,) = library.run(c, given, rows)
        want = reference(c, [library.multiplied(c, given[0]), *given[1:]])
        assert_close(y.reshape(-1, y.shape[-1]), want.reshape(-1, y.shape[-1]), bound, name)


def check_same_bits(
    library: Library, c: Case, counts: tuple[int, ...], name: str
) -> tuple[list[np.ndarray], np.ndarray]:
    """The first rows have the same bits whatever is beside them; what the most rows are given and become."""
    given = arrays(c, max(counts))
    (whole,) = library.run(c, given, max(counts))
    for rows in counts:
        for threads in (1, 3):
            (y,) = library.run(c, some(c, given, slice(0, rows)), rows, threads=threads)
            assert_same_bits(y, whole[:rows], f"{name}, {rows} rows, {threads} threads")
    return given, whole


@pytest.mark.parametrize("name", PRODUCTS)
def test_close_to_the_reference(library: Library, name: str) -> None:
    check_close(library, PRODUCTS[name], 300, 3e-6, name)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_row_has_the_same_bits_in_every_step(library: Library, name: str) -> None:
    c = PRODUCTS[name]
    given, whole = check_same_bits(library, c, ROWS, name)
    order = np.random.default_rng(0).permutation(max(ROWS))[:100]
    assert_same_bits(library.run(c, some(c, given, order), 100, threads=2)[0], whole[order], f"{name}, other order")


@pytest.mark.parametrize("name", [n for n in LINEAR if n.startswith("int8")])
def test_codes_times_codes_are_summed_exactly(library: Library, name: str) -> None:
    c = LINEAR[name]
    for rows in (3, 40):
        given = arrays(c, rows)
        x, row_scales, q, s, *bias = given
        total = x.astype(np.int64) @ q.astype(np.int64).T
        want = total.astype(np.float32) * (row_scales[..., None] * s)
        assert_same_bits(library.run(c, given, rows)[0], want + bias[0] if bias else want, name)


@pytest.mark.parametrize("name", ["fp8", "awq", "int8"])
@pytest.mark.parametrize("power", [-60, 60])
def test_scales_of_any_size(library: Library, name: str, power: int) -> None:
    c = LINEAR[name]
    at = inputs(c).index("s")
    given = arrays(c, 30)
    (one,) = library.run(c, given, 30)
    given[at] = given[at] * np.float32(2.0**power)
    assert_same_bits(library.run(c, given, 30)[0], one * np.float32(2.0**power), name)


def test_channels_whose_scale_is_zero(library: Library) -> None:
    c = LINEAR["awq-g32"]
    given = arrays(c, 2)
    given[2][:, 5] = 0
    assert (library.run(c, given, 2)[0][:, 5] == 0).all()


@pytest.mark.parametrize("name", EXPERTS)
def test_no_expert_at_all(library: Library, name: str) -> None:
    c = EXPERTS[name]
    given = arrays(c, 3)
    given[inputs(c).index("ids")][:] = 7
    assert (library.run(c, given, 3, threads=2)[0] == 0).all()


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings_are_exact(library: Library, name: str) -> None:
    c = EMBEDDINGS[name]
    given = [*arrays(c, len(IDS))[:-1], IDS]
    (y,) = library.run(c, given, len(IDS), threads=3)
    inside = (IDS >= 0) & (IDS < 130)
    np.testing.assert_array_equal(y[inside], reference(c, [*given[:-1], IDS[inside]]))
    assert (y[~inside] == 0).all()


def test_a_group_that_does_not_divide_k_has_no_kernel() -> None:
    with pytest.raises(PlancError, match="qlinear at top level has no kernel"):
        linear("awq-g32", 64, 40).kernel(parse("cpu:portable"))
