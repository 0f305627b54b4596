"""Products with weights on CUDA: every scheme against the op table, at edges of tiles, on archs with other tiles."""

import ml_dtypes
import numpy as np
import pytest

from planc.codegen.cuda.call import cdiv
from planc.compiler.ir.quant import quantize_rows, scheme
from planc.compiler.ir.types import PAIRS, TensorType
from planc.errors import PlancError
from tests.codegen.cuda.harness import made, reference, run
from tests.kernels.harness import Case, assert_close, case, f32, random, tensor

Array = np.ndarray
BF16 = ml_dtypes.bfloat16
# Sums of float32 in another order, over K in the hundreds.
BOUND = 2e-5


def weight_types(name: str, *shape: int) -> tuple[TensorType, ...]:
    """Types of the parts of a weight, in the layouts of the CUDA target."""
    row, w = scheme(name), TensorType("f32", shape)
    types = [row.part_type(w, part) for part in row.parts]
    if row.codes == "u4":
        types[0] = TensorType("u4", shape, PAIRS)
    return tuple(types)


def weight_parts(name: str, w: Array) -> list[Array]:
    """The parts of a weight; of a scheme that is only read, codes by chance and scales of powers of two."""
    row = scheme(name)
    if not row.read_only:
        return [row.part(w, part) for part in row.parts]
    rng = np.random.default_rng(7)
    q, s = (row.part_type(TensorType("f32", w.shape), part) for part in row.parts)
    return [rng.integers(0, 16, q.shape).astype(np.uint8), np.exp2(rng.integers(-4, 4, s.shape)).astype(np.float32)]


def rows_for(name: str, x: Array) -> list[Array]:
    """What the scheme multiplies: codes and scales of rows, or x as bf16 holds it."""
    act = scheme(name).act
    return list(quantize_rows(x, act)) if act else [x.astype(BF16).astype(np.float32)]


def row_types(name: str, *shape: int | str) -> tuple[TensorType, ...]:
    act = scheme(name).act
    return (tensor(act, *shape), f32(*shape[:-1])) if act else (f32(*shape),)


def check(c: Case, arrays: list[Array], arch: int, bound: float = BOUND) -> None:
    (got,) = run(c, arrays, arch)
    (want,) = reference(c, arrays)
    assert_close(got, want, bound, c)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize(("tokens", "n", "k"), [(1, 64, 64), (3, 40, 72), (17, 130, 200), (65, 64, 192), (130, 33, 31)])
def test_linear(dtype: str, tokens: int, n: int, k: int) -> None:
    c = case("linear", f32("T", k), tensor(dtype, n, k), f32(n), bias=True)
    x = random(tokens, k).astype(BF16).astype(np.float32) if dtype == "bf16" else random(tokens, k)
    w = random(n, k, seed=1, scale=0.1).astype(BF16 if dtype == "bf16" else np.float32)
    for arch in (80, 90):
        check(c, [x, w, random(n, seed=2)], arch)


def test_linear_of_a_view_with_heads_and_rows_of_logits() -> None:
    x, w = random(5, 3, 64), random(48, 64, seed=1).astype(BF16)
    c = case("linear", f32("T", 3, 64, layout="strides:384,128"), tensor("bf16", 48, 64))
    rounded = x.astype(BF16).astype(np.float32)
    check(c, [rounded, w], 80)
    with pytest.raises(PlancError, match="linear at top level has no kernel on sm_80"):
        made(case("linear", f32("T", 3, 64, layout="strides:384,64"), tensor("bf16", 48, 64)), 80, 1)
    check(case("linear", f32("R", 64), tensor("bf16", 48, 64)), [rounded[:, 0], w], 89)


@pytest.mark.parametrize(
    "name", ["int8", "int8-wo", "fp8", "fp8-block", "int4-wo", "awq", "awq-g64", "int4-wo-g32", "mxfp4"]
)
@pytest.mark.parametrize(("tokens", "n", "k"), [(1, 64, 128), (19, 150, 384), (70, 33, 256)])
def test_qlinear(name: str, tokens: int, n: int, k: int) -> None:
    types = (*row_types(name, "T", k), *weight_types(name, n, k), f32(n))
    arrays = [*rows_for(name, random(tokens, k)), *weight_parts(name, random(n, k, seed=1)), random(n, seed=2)]
    for arch in (89, 90):
        check(Case("qlinear", types, (("scheme", name), ("bias", True))), arrays, arch)


@pytest.mark.parametrize("name", ["int8", "int8-wo", "fp8", "fp8-block"])
def test_qlinear_of_a_ragged_k(name: str) -> None:
    types = (*row_types(name, "T", 200), *weight_types(name, 48, 200))
    arrays = [*rows_for(name, random(3, 200)), *weight_parts(name, random(48, 200, seed=1))]
    check(Case("qlinear", types, (("scheme", name),)), arrays, 90)


def test_qlinear_of_fp8_is_refused_where_there_are_no_such_products() -> None:
    types = (*row_types("fp8", "T", 64), *weight_types("fp8", 64, 64))
    with pytest.raises(PlancError, match=r"has no kernel on sm_80 .* \(from sm_89\) f8e4m3"):
        made(Case("qlinear", types, (("scheme", "fp8"),)), 80, 1)


EXPERTS = [(1, 4, 2, 48, 64), (9, 5, 3, 40, 96), (40, 3, 2, 70, 64), (6, 60, 2, 32, 64)]


def expert_ids(tokens: int, experts: int, slots: int) -> Array:
    """Choices of experts, some of which are none."""
    ids = np.random.default_rng(3).integers(0, experts, (tokens, slots)).astype(np.int32)
    ids[0, 0] = -1
    ids[-1, -1] = experts
    return ids


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize(("tokens", "experts", "slots", "n", "k"), EXPERTS)
def test_expert_linear(dtype: str, tokens: int, experts: int, slots: int, n: int, k: int) -> None:
    w = random(experts, n, k, seed=1, scale=0.1).astype(BF16 if dtype == "bf16" else np.float32)
    ids, bias = expert_ids(tokens, experts, slots), random(experts, n, seed=2)
    weights = (tensor(dtype, experts, n, k), f32(experts, n))
    shared = case("expert_linear", f32("T", k), tensor("i32", "T", slots), *weights, bias=True)
    apart = case("expert_linear", f32("T", slots, k), tensor("i32", "T", slots), *weights, bias=True)
    rounded = BF16 if dtype == "bf16" else np.float32
    want = reference(shared, [random(tokens, k).astype(rounded).astype(np.float32), ids, w, bias])[0]
    assert not want[0, 0].any(), "an id of no expert gives zeros, without the bias"
    check(shared, [random(tokens, k).astype(rounded).astype(np.float32), ids, w, bias], 80)
    check(apart, [random(tokens, slots, k).astype(rounded).astype(np.float32), ids, w, bias], 90)


def test_expert_linear_where_all_tokens_have_the_same_experts() -> None:
    w = random(3, 32, 64, seed=1).astype(BF16)
    c = case("expert_linear", f32("T", 64), tensor("i32", 3), tensor("bf16", 3, 32, 64))
    check(c, [random(5, 64).astype(BF16).astype(np.float32), np.array([2, 0, 1], np.int32), w], 80)


@pytest.mark.parametrize("name", ["int8", "int8-wo", "fp8", "fp8-block", "awq", "int4-wo", "mxfp4"])
@pytest.mark.parametrize("apart", [False, True])
def test_qexpert_linear(name: str, apart: bool) -> None:
    tokens, experts, slots, n, k = 21, 4, 2, 48, 256
    shape = (slots, k) if apart else (k,)
    types = (*row_types(name, "T", *shape), tensor("i32", "T", slots))
    types += (*weight_types(name, experts, n, k), f32(experts, n))
    arrays = [*rows_for(name, random(tokens, *shape)), expert_ids(tokens, experts, slots)]
    arrays += [*weight_parts(name, random(experts, n, k, seed=1)), random(experts, n, seed=2)]
    check(Case("qexpert_linear", types, (("scheme", name), ("bias", True))), arrays, 90 if apart else 89)


def test_what_one_launch_adds_up_does_not_depend_on_the_bucket() -> None:
    """BK orders the additions: it is the same for every number of rows, as is the kind of instruction."""
    for arch in (80, 86, 89, 90, 100, 120):
        for name in ("int8", "int8-wo", "awq", "mxfp4"):
            types = (*row_types(name, "T", 256), *weight_types(name, 4096, 256))
            tiles = [
                made(Case("qlinear", types, (("scheme", name),)), arch, t)[0].kernel.constants for t in (1, 40, 500)
            ]
            assert len({t["BK"] for t in tiles}) == 1
            if arch in (90, 100):
                side = "BN" if name in ("int8-wo", "awq", "mxfp4") else "BM"
                assert all(int(str(t[side])) >= 64 for t in tiles), "below 64 rows another instruction is used"


def test_buckets_share_kernels() -> None:
    """A kernel is compiled once for all buckets of its tile, whatever their sizes, and there are few tiles."""
    c = case("linear", f32("T", 4096), tensor("bf16", 6144, 4096))
    for arch in (80, 90):
        assert len({made(c, arch, t)[0].kernel.name for t in (1, 2, 8, 16)}) == 1
        assert len({made(c, arch, t)[0].kernel.name for t in (512, 600, 2048)}) == 1
        assert len({made(c, arch, 1 << n)[0].kernel.name for n in range(12)}) <= 5
    norm = case("rms_norm", f32("T", 4096), f32(4096), eps=1e-5)
    assert len({made(norm, 90, t)[0].kernel.name for t in (1, 16, 300)}) == 1


def test_the_grid_covers_every_tile() -> None:
    (call,) = made(case("linear", f32("T", 64), tensor("bf16", 1000, 64)), 90, 300)
    bm, bn = (int(str(call.kernel.constants[s])) for s in ("BM", "BN"))
    assert call.grid == (cdiv(300, bm) * cdiv(1000, bn), 1, 1)
