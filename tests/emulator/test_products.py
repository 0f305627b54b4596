"""Products as plans ship them, on the tensor cores of every SM: the instruction that they use, and what they give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planc.codegen.cuda import aot
from planc.emulator.machine import KernelFault
from planc.emulator.run import run_kernel
from tests.codegen.cuda import test_compiled
from tests.codegen.cuda.harness import made, reference, run
from tests.codegen.cuda.test_compiled import emulated, product, quantized
from tests.kernels.harness import assert_close

BF16 = dict.fromkeys((80, 89, 120), r"mma\.sync.*f32\.bf16\.bf16\.f32") | {90: r"wgmma\.mma_async.*f32\.bf16\.bf16"}
FP8 = dict.fromkeys((89, 120), r"mma\.sync.*e4m3\.e4m3") | {90: r"wgmma\.mma_async.*e4m3\.e4m3"}
INT8 = dict.fromkeys((80, 89, 120), r"mma\.sync.*s32\.s8\.s8\.s32") | {90: r"wgmma\.mma_async.*s32\.s8\.s8"}
for kinds, kind in ((BF16, "f16"), (FP8, "f8f6f4"), (INT8, "i8")):
    kinds[100] = rf"tcgen05\.mma.*kind::{kind}"
PRODUCTS = {  # name -> the case, its instruction by SM, the SMs of every run; the others are nightly
    "bf16, 1 row": (product(1, 200, 320), BF16, (90, 100)),
    "bf16": (product(130, 200, 320), BF16, (120,)),
    "int8": (quantized("int8", 19), INT8, (90, 100)),
    "fp8": (quantized("fp8", 70), FP8, (89, 90, 100, 120)),
}
ROWS = [
    pytest.param(name, arch, marks=[] if arch in fast else [pytest.mark.slow])
    for name, (_, uses, fast) in PRODUCTS.items()
    for arch in uses
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels are compiled to; those of every run at once."""
    folder = tmp_path_factory.mktemp("products")
    for arch in (89, 90, 100, 120):
        cases = [(c, arrays) for (c, arrays), _, fast in PRODUCTS.values() if arch in fast]
        calls = [call for c, arrays in cases for call in made(c, arch, len(arrays[0]))]
        aot.compile([call.kernel for call in calls], arch, folder / str(arch))
    return folder


@pytest.mark.parametrize(("name", "arch"), ROWS)
def test_products(name: str, arch: int, folder: Path) -> None:
    (c, arrays), uses, _ = PRODUCTS[name]
    (got,) = run(c, arrays, arch, runner=emulated(folder, arch))
    assert_close(got, reference(c, arrays)[0], 2e-5, name)
    texts = [(folder / str(arch) / f"{call.kernel.name}.ptx").read_text() for call in made(c, arch, len(arrays[0]))]
    assert any(re.search(uses[arch], text) for text in texts), f"no {uses[arch]}"


MISTAKES = {  # what is changed in a product of sm_100, and what is said of it
    "no wait for the product": (r"mbarrier\.try_wait[^;]*;\s*@!complete[^;]*;", "", "by a product whose barrier"),
    "no wait for the store": (r"tcgen05\.wait::st\.sync\.aligned;", "", "a store that was not waited for"),
    "no deallocation": (r"@%p\d+ tcgen05\.dealloc[^;]*;", "", "ends with 64 columns of tensor memory"),
    "too few columns": (r"(tcgen05\.alloc\S+ \S+) 64;", r"\1 32;", "column 512 of tensor memory is not allocated"),
    "another quarter": (r"6291456", "2097152", "lane 0 of tensor memory is touched by a warp .* 64 to 95"),
    "the next column": (r"(tcgen05\.ld\S+ {[^}]*}, \[%r\d+ \+) 0\]", r"\1 1]", None),
    "another row of A": (r"(tcgen05\.mma\S+ \[[^]]*\], \[ %r\d+ \+) 8 ]", r"\1 16 ]", None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_product_shows(mistake: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, to, says = MISTAKES[mistake]
    c, arrays = PRODUCTS["bf16, 1 row"][0]

    def changed(text: str, *rest: object) -> None:
        wrong, count = re.subn(pattern, to, text)
        assert count
        run_kernel(wrong, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(test_compiled, "run_kernel", changed)
    if says:
        with pytest.raises(KernelFault, match=says):
            run(c, arrays, 100, runner=emulated(folder, 100))
    else:
        (got,) = run(c, arrays, 100, runner=emulated(folder, 100))
        with pytest.raises(AssertionError):
            assert_close(got, reference(c, arrays)[0], 2e-5, mistake)
