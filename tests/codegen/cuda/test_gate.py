"""The static gate: each thing that must not ship is refused by name, in numbers that were made and in real cubins."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from planc.codegen.cuda import aot, gate
from planc.codegen.cuda.call import TritonKernel, kernel
from planc.codegen.cuda.cubin import Cubin, Resources
from planc.codegen.skus import SMS
from planc.errors import PlancError
from planc.plans.launches import Binary

SIGNATURE = {"x_ptr": "*bf16", "w_ptr": "*bf16", "y_ptr": "*fp32", "rows": "i32"}
KERNEL = kernel("gemm", "linear", SIGNATURE, {"BM": 64})
PARAMS = ((0, 8), (8, 8), (16, 8), (24, 4), (32, 8), (40, 8))
BINARY = Binary(KERNEL.name, "linear", 128, 65536, PARAMS, 2)
FOUND = Resources(registers=128, stack=0, threads=128, static_shared=0, code=4096, params=PARAMS)


def verdict(
    *,
    sm: int = 90,
    binary: Binary = BINARY,
    found: Resources = FOUND,
    counts: dict[str, int] | None = None,
    **of: object,
) -> str:
    """What the gate says of the kernel with some things changed."""
    counts = {"HGMMA": 4} if counts is None else counts
    try:
        gate.check(replace(KERNEL, **of), binary, Cubin(sm, {"linear": found}), counts, SMS[90])
    except PlancError as e:
        return str(e)
    return ""


def test_a_good_kernel_passes() -> None:
    assert verdict() == ""
    assert verdict(found=replace(FOUND, stack=8)) == "", "a stack that nothing is stored to"


@pytest.mark.parametrize(
    ("told", "changes"),
    [
        ("it is code for SM 80", {"sm": 80}),
        (
            "it takes 232449 B of shared memory, and a block may have 232448",
            {"binary": replace(BINARY, shared=232445), "found": replace(FOUND, static_shared=4)},
        ),
        (
            "no SM has room for a block of 1024 threads with 128 registers each",
            {"binary": replace(BINARY, threads=1024), "found": replace(FOUND, threads=1024)},
        ),
        (
            r"its parameters take \[8, 8, 8, 8, 8, 8\] B, expected \[8, 8, 8, 4, 8, 8\]",
            {"binary": replace(BINARY, params=(*PARAMS[:3], (24, 8), *PARAMS[4:]))},
        ),
        ("it has 64 threads, expected 4 warps", {"binary": replace(BINARY, threads=64)}),
        (
            "it spills 24 B a thread, 16 are allowed",
            {"found": replace(FOUND, stack=24), "counts": {"HGMMA": 4, "STL": 2}},
        ),
        (
            "it spills 24 B a thread, 16 are allowed",
            {"function": "draw", "found": replace(FOUND, stack=24), "counts": {"STL": 2}},
        ),
        (
            "it spills 24 B a thread, 16 are allowed",
            {"function": "all_gather", "suffix": ".cu", "found": replace(FOUND, stack=24), "counts": {"STL": 2}},
        ),
        ("it has no HGMMA, but HMMA", {"counts": {"HMMA": 64}}),
        ("it has no QGMMA, but HGMMA", {"signature": SIGNATURE | {"w_ptr": "*fp8e4nv"}}),
        (
            "it has no IGMMA, but no instructions of tensor cores",
            {"signature": SIGNATURE | {"w_ptr": "*i8"}, "counts": {}},
        ),
    ],
)
def test_what_must_not_ship(told: str, changes: dict) -> None:
    said = verdict(**changes)
    assert said.startswith(f"kernel {KERNEL.name} fails the gate for sm_90a: ")
    assert re.search(told, said), said


def test_products_of_floats_and_other_kernels_need_no_tensor_cores() -> None:
    assert verdict(counts={}, signature=SIGNATURE | {"w_ptr": "*fp32"}) == ""
    assert verdict(counts={"STL": 1}, found=replace(FOUND, stack=24), function="add") == ""


SOURCE = """
import triton
import triton.language as tl


@triton.jit
def linear(x_ptr, w_ptr, y_ptr, BM: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.arange(0, BM), tl.arange(0, 64), tl.arange(0, BK)
    x, w = tl.load(x_ptr + m[:, None] * BK + k[None, :]), tl.load(w_ptr + n[None, :] * BK + k[:, None])
    tl.store(y_ptr + m[:, None] * 64 + n[None, :], tl.dot(x, w))
"""


@pytest.mark.parametrize(
    ("arch", "rows", "depth", "told"),
    [
        (90, 64, 64, ""),
        (90, 16, 64, "it has no HGMMA, but HMMA"),
        (89, 16, 64, ""),
        (89, 64, 512, r"it takes \d+ B of shared memory, and a block may have 101376"),
    ],
)
def test_real_cubins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: int, rows: int, depth: int, told: str
) -> None:
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "gemm.py").write_text(SOURCE)
    types = {"x_ptr": "*bf16", "w_ptr": "*bf16", "y_ptr": "*fp32"}
    made: TritonKernel = kernel("gemm", "linear", types, {"BM": rows, "BK": depth}, aligned=frozenset(types))
    for _ in range(2):  # compiled, and from the cache
        if not told:
            aot.compile([made], arch, tmp_path / "out", sources=tmp_path)
            continue
        with pytest.raises(PlancError, match=f"fails the gate for sm_{arch}a?: .*{told}"):
            aot.compile([made], arch, tmp_path / "out", sources=tmp_path)
        assert not list((tmp_path / "out").glob("*.cubin"))
