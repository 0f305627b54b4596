"""The CUDA compiler: bytes that depend on the kernel alone, a cache, resources read from the cubin, named errors."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from planc.codegen.cuda import aot, cubin, toolchain
from planc.codegen.cuda.call import kernel
from planc.errors import PlancError

SOURCE = """
import triton
import triton.language as tl


@triton.jit
def scaled(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr, SHIFTS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    for i in tl.static_range(len(SHIFTS)):
        x += SHIFTS[i]
    tl.store(y_ptr + at, (x * factor).to(y_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def broken(x_ptr):
    tl.store(x_ptr, undefined_name)


@triton.jit
def product(x_ptr, w_ptr, y_ptr):
    i = tl.arange(0, 32)
    square = i[:, None] * 32 + i[None, :]
    tl.store(y_ptr + square, tl.dot(tl.load(x_ptr + square), tl.load(w_ptr + square)))
"""
SCALED = kernel(
    "small",
    "scaled",
    {"x_ptr": "*bf16", "y_ptr": "*fp32", "n": "i32", "factor": "fp32"},
    {"BLOCK": 1024, "SHIFTS": (1.0, 2.0)},
    aligned=frozenset({"x_ptr", "y_ptr", "n"}),
)
PRODUCT = kernel("small", "product", {n: "*fp32" for n in ("x_ptr", "w_ptr", "y_ptr")}, {}, num_warps=8)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path / "cache"))
    return folder_of_sources(tmp_path / "sources")


def folder_of_sources(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "small.py").write_text(SOURCE)
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_compiles_and_says_what_a_launch_needs(sources: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    made = aot.compile(
        [SCALED, PRODUCT, SCALED], 90, tmp_path / "out", sources=sources, progress=lambda *a: seen.append(a)
    )
    assert [b.name for b in made] == [SCALED.name, PRODUCT.name]
    assert sorted(seen)[0][:2] == (1, 2)
    assert sorted(seen)[1][:2] == (2, 2)
    scaled, product = made
    assert (scaled.entry, scaled.threads, scaled.hidden) == ("scaled", 128, 2)
    assert scaled.params == ((0, 8), (8, 8), (16, 4), (20, 4), (24, 8), (32, 8))
    assert product.threads == 256
    assert product.shared >= 2 * 32 * 32 * 4
    text = (tmp_path / "out" / f"{SCALED.name}.ptx").read_text()
    assert ".target sm_90a" in text
    assert ".version 9.0" in text
    assert ".loc" not in text
    assert "ld.global.v4.b32" in text
    assert "st.global.v4.b32" in text


def test_a_product_of_floats_is_not_tf32(sources: Path, tmp_path: Path) -> None:
    aot.compile([PRODUCT], 80, tmp_path, sources=sources)
    text = (tmp_path / f"{PRODUCT.name}.ptx").read_text()
    assert "tf32" not in text
    assert "fma.rn.f32" in text


def test_equal_bytes_from_another_folder_and_another_cache(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    made = aot.compile([SCALED, PRODUCT], 89, first, sources=sources)
    elsewhere = folder_of_sources(tmp_path / "a longer path" / "of sources")
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path / "other cache"))
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")  # what is set outside changes nothing
    assert aot.compile([SCALED, PRODUCT], 89, second, sources=elsewhere) == made
    assert digests(first) == digests(second)


def test_the_cache_answers_without_a_compiler(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = aot.compile([SCALED], 80, tmp_path / "first", sources=sources)

    def no_worker(tools: toolchain.Toolchain) -> toolchain.Worker:
        raise AssertionError("compiled again")

    monkeypatch.setattr(aot, "Worker", no_worker)
    assert aot.compile([SCALED], 80, tmp_path / "second", sources=sources) == made
    assert digests(tmp_path / "first") == digests(tmp_path / "second")
    changed = [(SCALED, 86), (replace(SCALED, num_stages=1), 80), (replace(SCALED, aligned=frozenset()), 80)]
    for other, arch in changed:
        with pytest.raises(AssertionError, match="compiled again"):
            aot.compile([other], arch, tmp_path, sources=sources)
    (sources / "small.py").write_text(SOURCE + "\n")
    with pytest.raises(AssertionError, match="compiled again"):
        aot.compile([SCALED], 80, tmp_path, sources=sources)


def test_the_kernel_that_fails_is_named(sources: Path, tmp_path: Path) -> None:
    bad = kernel("small", "broken", {"x_ptr": "*fp32"}, {})
    with pytest.raises(PlancError, match=f"kernel {bad.name} does not compile for SM 90: .*undefined_name"):
        aot.compile([bad], 90, tmp_path / "out", sources=sources)
    assert not list((tmp_path / "cache/kernels").iterdir())


def test_what_the_compiler_says_of_cuda_is_told(sources: Path, tmp_path: Path) -> None:
    (sources / "small.cu").write_text('extern "C" __global__ void KERNEL(float* x) { *x = missing; }')
    bad = kernel("small", "wrong", {"x": "*fp32"}, {}, suffix=".cu")
    with pytest.raises(PlancError, match=f'{bad.name} does not compile for SM 90: .*"missing" is undefined'):
        aot.compile([bad], 90, tmp_path / "out", sources=sources)


def test_a_crash_of_the_compiler_is_an_error(sources: Path, tmp_path: Path) -> None:
    text = SOURCE.replace("import triton\n", "import os, sys, triton\nprint('about to die'); os._exit(7)\n", 1)
    (sources / "small.py").write_text(text)
    with pytest.raises(PlancError, match=f"kernel {SCALED.name} .*ended with status 7: about to die"):
        aot.compile([SCALED], 90, tmp_path / "out", sources=sources)


def test_missing_wheels_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain.toolchain.cache_clear()
    found = toolchain._folders()
    monkeypatch.setattr(toolchain, "_folders", lambda: ())
    with pytest.raises(PlancError, match=r"ptxas of the wheel nvidia-cuda-nvcc is missing; .*planc\[build-cuda\]"):
        toolchain.toolchain()
    for name in ("bin", "lib"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin/ptxas").symlink_to(next(Path(f) / "bin/ptxas" for f in found if (Path(f) / "bin/ptxas").exists()))
    monkeypatch.setattr(toolchain, "_folders", lambda: (str(tmp_path),))
    with pytest.raises(PlancError, match=r"libnvrtc.so.13 of the wheel nvidia-cuda-nvrtc is missing; .*build-cuda"):
        toolchain.toolchain()
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlancError, match=r"triton, which is not installed; .*planc\[build-cuda\]"):
        toolchain.toolchain()


def test_another_release_of_ptxas_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain.toolchain.cache_clear()
    monkeypatch.setattr(toolchain.importlib.metadata, "version", lambda name: "13.5.2")
    with pytest.raises(PlancError, match=r"nvidia-cuda-nvcc is 13\.5\.2, expected 13\.0"):
        toolchain.toolchain()


class TestCubin:
    def test_what_is_no_cubin(self) -> None:
        with pytest.raises(PlancError, match="not a cubin"):
            cubin.read(b"MZ" + bytes(100))

    @pytest.mark.parametrize("arch", [80, 120])
    def test_resources(self, sources: Path, tmp_path: Path, arch: int) -> None:
        aot.compile([PRODUCT], arch, tmp_path, sources=sources)
        data = (tmp_path / f"{PRODUCT.name}.cubin").read_bytes()
        found = cubin.read(data)
        assert found.sm == arch
        (product,) = found.kernels.values()
        assert product.threads == 256
        assert 16 <= product.registers <= 255
        assert [size for _, size in product.params] == [8] * 5
        for cut in (70, len(data) // 4, len(data) // 2):
            with pytest.raises(PlancError, match="cannot be read"):
                cubin.read(data[:cut])


def test_a_cached_kernel_is_that_of_what_its_source_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kernels"
    shutil.copytree(aot.KERNELS, folder)
    monkeypatch.setattr(aot, "KERNELS", folder)
    tools = toolchain.toolchain()

    def places() -> list[Path]:
        return [aot._place(kernel(name, "any", {}, {}), 90, tools, folder) for name in ("rounded", "embedding")]

    before = places()
    with (folder / "norm.py").open("a") as f:
        f.write("\n# changed\n")
    assert [old == new for old, new in zip(before, places(), strict=True)] == [False, True]
