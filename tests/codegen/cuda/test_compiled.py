"""Kernels as they ship: compiled for an SM, their PTX run in the emulator, against the op table, at edges of tiles."""

from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from planc.codegen.cuda import aot
from planc.codegen.cuda.call import Call
from planc.compiler.ir import gated
from planc.compiler.ir.ops import OPS
from planc.emulator.run import run_kernel
from planc.plans.launches import Binary
from tests.codegen.cuda.harness import Runner, made, reference, run
from tests.codegen.cuda.test_dense import expert_ids, row_types, rows_for, weight_parts, weight_types
from tests.kernels.harness import Buffer, Case, assert_close, assert_same_bits, case, f32, i32, random, tensor

Array = np.ndarray
BF16 = ml_dtypes.bfloat16


def bf16(x: Array) -> Array:
    return x.astype(BF16).astype(np.float32)


def product(tokens: int, n: int = 40, k: int = 136) -> tuple[Case, list[Array]]:
    c = case("linear", f32("T", k), tensor("bf16", n, k), f32(n), bias=True)
    return c, [bf16(random(tokens, k)), random(n, k, seed=1).astype(BF16), random(n, seed=2)]


def quantized(name: str, tokens: int = 3) -> tuple[Case, list[Array]]:
    types = (*row_types(name, "T", 256), *weight_types(name, 72, 256), f32(72))
    arrays = [*rows_for(name, random(tokens, 256)), *weight_parts(name, random(72, 256, seed=1)), random(72, seed=2)]
    return Case("qlinear", types, (("scheme", name), ("bias", True))), arrays


def experts(name: str) -> tuple[Case, list[Array]]:
    shape, ids = (4, 40, 128), expert_ids(5, 4, 2)
    types = (*row_types(name, "T", 128), tensor("i32", "T", 2), *weight_types(name, *shape), f32(*shape[:2]))
    arrays = [*rows_for(name, random(5, 128)), ids, *weight_parts(name, random(*shape, seed=1)), random(4, 40, seed=2)]
    return Case("qexpert_linear", types, (("scheme", name), ("bias", True))), arrays


def simple(c: Case, tokens: int = 5) -> tuple[Case, list[Array]]:
    def array(i: int, dtype: str, shape: list[int]) -> Array:
        whole = (np.arange(np.prod(shape)) * 7 % 40).reshape(shape).astype(np.int32)
        return whole if dtype == "i32" else random(*shape, seed=i) + np.float32(0.5)

    shapes = [[tokens if isinstance(d, str) else d for d in t.shape] for t in c.types]
    return c, [array(i, t.dtype, shape) for i, (t, shape) in enumerate(zip(c.types, shapes, strict=True))]


TABLES = (f32(50, 20), f32(50, 20), i32("T"))
VIEW = "strides:400,96"
WIDE = f32("T", 70, layout="strides:140")
FAST = {
    "linear": product(3),
    "awq": quantized("awq"),
    "norm": simple(case("add_rms_norm", f32("T", 70), f32("T", 70), f32(70), eps=1e-5)),
    "rotary": simple(case("rotary", f32("T", 3, 80, layout=VIEW), *TABLES, interleaved=False)),
    "act_mul": simple(
        case("act_mul", f32("T", 70, layout="strides:140"), f32("T", 70, layout="strides:140"), act="silu")
    ),
    "softmax": simple(case("softmax", f32("T", 3, 40))),
    "topk": simple(case("topk", f32("T", 100), k=4, largest=True)),
    "norm and rows to i8": simple(case("add_rms_norm_quantize", WIDE, WIDE, f32(70), eps=1e-5, dtype="i8")),
    "rows that turn": simple(case("act_mul_quantize", *[f32("T", 208)] * 2, act="silu", dtype="i8", hadamard=16)),
}
SLOW = {
    "linear of many rows": product(130, 130),
    "linear of f32": (
        case("linear", f32("T", 40), f32(24, 40)),
        [random(20, 40), random(24, 40, seed=1)],
    ),
    **{n: quantized(n) for n in ("int8", "int8-wo", "fp8", "fp8-block", "int4-wo", "mxfp4")},
    **{f"{n} of many rows": quantized(n, 70) for n in ("int8", "int8-wo", "fp8", "awq", "mxfp4")},
    **{f"experts {n}": experts(n) for n in ("int8", "int8-wo", "fp8", "awq", "mxfp4")},
    "rows to i8": simple(case("quantize_rows", f32("T", 3, 100), dtype="i8")),
    "layer norm and rows to i8": simple(
        case("layer_norm_quantize", WIDE, f32(70), f32(70), f32(70), eps=1e-5, bias=True, shift=True, dtype="i8")
    ),
    "act_mul and rows to fp8": simple(case("act_mul_quantize", WIDE, WIDE, i32(30), act="silu", dtype="f8e4m3")),
    "embedding": simple(case("embedding", f32(50, 60), i32("T"))),
    "interleaved": simple(case("rotary", f32("T", 3, 80, layout=VIEW), *TABLES, interleaved=True)),
    "layer norm": simple(case("layer_norm", f32("T", 3, 70), f32(70), f32(70), eps=1e-5, bias=True)),
    "matmul": simple(case("matmul", f32("T", 3, 5, 40), f32("T", 3, 40, 7))),
    "cumsum": simple(case("cumsum", f32("T", 70))),
    "argmax": simple(case("argmax", f32("T", 70))),
    "concat": simple(case("concat", f32("T", 3, 4), f32("T", 3, 5), axis=2)),
    "chain": simple(
        case("fused", f32("T", 70), f32(70), code="tanh(i0);gelu(t0);abs(i1);pow(t2,1.5);div(t1,t3);floor(t4)")
    ),
}
NO_FP8 = (80,)
QUICK = {90: tuple(FAST), 80: ("linear", "awq"), 100: ("awq", "softmax")}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels are compiled to; those of the fast cases at once, by one compiler."""
    folder = tmp_path_factory.mktemp("compiled")
    for arch, names in QUICK.items():
        calls = [call for name in names for call in made(FAST[name][0], arch, len(FAST[name][1][0]))]
        aot.compile([call.kernel for call in calls], arch, folder / str(arch))
    return folder


def emulated(folder: Path, arch: int) -> Runner:
    """Runs a call as its PTX says; kernels are compiled when they are first met."""

    def launch(call: Call, buffers: Mapping[str, Buffer]) -> None:
        binary = compiled(folder, arch, call)
        data = {n: b.data for n, b in buffers.items()}
        args = [data[str(r.value)][r.offset :] if r.kind in ("value", "scratch") else r.value for r in call.args]
        text = (folder / str(arch) / f"{binary.name}.ptx").read_text()
        run_kernel(text, call.grid, args, binary.shared)  # type: ignore[arg-type]

    return launch


def compiled(folder: Path, arch: int, call: Call) -> Binary:
    (binary,) = aot.compile([call.kernel], arch, folder / str(arch))
    return binary


def check(c: Case, arrays: list[Array], arch: int, folder: Path) -> None:
    for got, want in zip(run(c, arrays, arch, runner=emulated(folder, arch)), reference(c, arrays), strict=True):
        if want.dtype == np.float32:
            assert_close(got, want, 2e-5, c)
        else:
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("name", "arch"), [(name, arch) for arch, names in QUICK.items() for name in names])
def test_compiled(name: str, arch: int, kernels: Path) -> None:
    check(*FAST[name], arch, kernels)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("name", SLOW)
def test_compiled_more(name: str, arch: int, kernels: Path) -> None:
    if "fp8" in name and arch in NO_FP8:
        pytest.skip("no products of fp8")
    check(*SLOW[name], arch, kernels)


ROWS = [(name, arch) for arch in (80, 90, 100) for name in ("bf16", "int8", "awq") if (name, arch) != ("bf16", 90)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch"), ROWS)
def test_the_bits_of_a_row_do_not_depend_on_the_bucket(name: str, arch: int, kernels: Path) -> None:
    c, many = product(130, 64, 256) if name == "bf16" else quantized(name, 130)
    (want,) = run(c, many, arch, runner=emulated(kernels, arch))
    for tokens in (1, 20, 70):
        some = [a[:tokens] if t.shape[0] == "T" else a for a, t in zip(many, c.types, strict=True)]
        (got,) = run(c, some, arch, runner=emulated(kernels, arch))
        assert_same_bits(got, want[:tokens], f"{name} in a step of {tokens} tokens on sm_{arch}")


def test_every_op_of_a_graph_has_kernels() -> None:
    """Every op that is no view but attention's own, on every arch."""
    from planc.codegen.cuda.table import TABLE

    # `attention` is what tracing leaves; the KV pass makes `paged_attention` of it. Collectives are their own launches.
    without = {"attention", "all_reduce", "all_gather", *gated.NAMES}  # the last are fused for CPUs alone
    missing = {op.name for op in OPS.values() if not op.view} - {row.op for row in TABLE} - without
    assert not missing
    assert made(case("exp", f32("T", 3)), 120, 1)
