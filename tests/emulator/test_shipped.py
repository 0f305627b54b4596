"""Kernels of plans as they ship: compiled PTX at its real tile sizes, on every SM, against the op table."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from planc.codegen.cuda.call import Bucket, Call
from planc.compiler.ir.ops import OPS
from tests.codegen.cuda import paged
from tests.codegen.cuda.harness import made, reference, run
from tests.codegen.cuda.test_dense import BF16, expert_ids, row_types, rows_for, weight_parts, weight_types
from tests.emulator.shipped import Shipped
from tests.kernels.harness import Case, assert_close, case, f32, random, tensor
from tests.kernels.paged import Shape
from tests.kernels.test_attention import World, attention

ARCHES = (80, 89, 90, 120)
WORLD = [1, 17, 63, 130]  # lengths of sequences
BUCKET = Bucket(70, 6, 6)


@dataclass(frozen=True)
class Product:
    """A product with weights, its arrays, and the tensor core instruction that it must be made of, by SM."""

    case: Case
    arrays: tuple[np.ndarray, ...]
    bound: float
    uses: dict[int, str]

    def calls(self, arch: int) -> tuple[Call, ...]:
        return made(self.case, arch, len(self.arrays[0]))

    def check(self, arch: int) -> None:
        (got,) = run(self.case, list(self.arrays), arch)
        (want,) = reference(self.case, list(self.arrays))
        assert_close(got, want, self.bound, self.case)


@dataclass(frozen=True)
class Attention:
    """Attention over paged keys: the last tokens of some sequences and all of another."""

    shape: Shape
    bound: float
    uses: dict[int, str]

    @property
    def given(self) -> list[np.ndarray]:
        world = World(self.shape, WORLD)
        return world.step([(i, 0 if n == 63 else n - 1, n) for i, n in enumerate(WORLD)])

    def calls(self, arch: int) -> tuple[Call, ...]:
        return paged.made(attention(self.shape, {}), BUCKET, self.given[2].shape[1], arch)

    def check(self, arch: int) -> None:
        c, given = attention(self.shape, {}), self.given
        (want,) = OPS[c.op].ref(dict(c.attrs), given, c.types)
        got = paged.attend(c, given, BUCKET, arch)
        assert_close(got[: len(want)], want, self.bound, c)


MMA = dict.fromkeys((80, 89, 120), r"mma\.sync.*f32\.bf16\.bf16\.f32")
WGMMA = r"wgmma\.mma_async.*f32\.bf16\.bf16"


def linear(dtype: str, tokens: int, n: int, k: int, uses: dict[int, str]) -> Product:
    kind = BF16 if dtype == "bf16" else np.float32
    x = random(tokens, k).astype(kind).astype(np.float32)
    arrays = (x, random(n, k, seed=1, scale=0.1).astype(kind), random(n, seed=2))
    return Product(case("linear", f32("T", k), tensor(dtype, n, k), f32(n), bias=True), arrays, 2e-5, uses)


def qlinear(name: str, tokens: int, n: int, k: int, uses: dict[int, str]) -> Product:
    types = (*row_types(name, "T", k), *weight_types(name, n, k))
    arrays = (*rows_for(name, random(tokens, k)), *weight_parts(name, random(n, k, seed=1)))
    return Product(Case("qlinear", types, (("scheme", name),)), arrays, 2e-5, uses)


def experts(tokens: int, n: int, k: int) -> Product:
    c = case("expert_linear", f32("T", k), tensor("i32", "T", 2), tensor("bf16", 4, n, k))
    x = random(tokens, k).astype(BF16).astype(np.float32)
    return Product(c, (x, expert_ids(tokens, 4, 2), random(4, n, k, seed=1, scale=0.1).astype(BF16)), 2e-5, {})


FP8 = dict.fromkeys((89, 120), r"mma\.sync.*e4m3\.e4m3") | {90: r"wgmma.*e4m3\.e4m3"}
INT8 = dict.fromkeys((80, 89, 120), r"mma\.sync.*s32\.s8\.s8\.s32") | {90: r"wgmma.*s32\.s8\.s8"}
KERNELS: dict[str, Callable[[], Product | Attention]] = {
    "linear bf16, 1 row": lambda: linear("bf16", 1, 200, 320, MMA | {90: WGMMA}),
    "linear bf16": lambda: linear("bf16", 130, 200, 320, MMA | {90: WGMMA}),
    "linear f32": lambda: linear("f32", 3, 72, 100, {}),
    "qlinear int8": lambda: qlinear("int8", 19, 150, 384, INT8),
    "qlinear int8-wo": lambda: qlinear("int8-wo", 19, 150, 384, MMA),
    "qlinear fp8": lambda: qlinear("fp8", 70, 150, 384, FP8),
    "qlinear fp8-block": lambda: qlinear("fp8-block", 19, 150, 384, {}),
    "qlinear awq": lambda: qlinear("awq", 19, 150, 384, MMA),
    "qlinear mxfp4": lambda: qlinear("mxfp4", 19, 150, 384, MMA),
    "experts bf16": lambda: experts(21, 70, 128),
    "attention bf16": lambda: Attention(Shape(8, 2, 128, 128, dtype="bf16"), 1e-2, MMA),
    "attention i8": lambda: Attention(Shape(4, 4, 64, 64, dtype="i8"), 2e-2, {}),
    "attention f32": lambda: Attention(Shape(3, 1, 80, 80), 2e-6, {}),
}
EVERY = [(name, arch) for name in KERNELS for arch in ARCHES if not (arch == 80 and "fp8" in name)]
# One of each tensor core, and what is most intricate; the rest is nightly.
FAST = [("linear bf16", 80), ("linear bf16", 90), ("linear bf16", 120), ("linear bf16, 1 row", 90)]
FAST += [("qlinear fp8", 89), ("qlinear fp8", 90), ("qlinear fp8", 120), ("qlinear int8", 90), ("qlinear awq", 80)]
FAST += [("attention bf16", 80), ("attention bf16", 90)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, request) -> Callable[[int], Shipped]:
    """Kernels by SM; those of all the chosen tests are compiled at once."""
    wanted: dict[int, list[str]] = {}
    for item in request.session.items:
        if item.path == request.path and hasattr(item, "callspec") and "arch" in item.callspec.params:
            wanted.setdefault(item.callspec.params["arch"], []).append(item.callspec.params["name"])
    made_for: dict[int, Shipped] = {}

    def of(arch: int) -> Shipped:
        if arch not in made_for:
            made_for[arch] = Shipped(arch, tmp_path_factory.mktemp(f"sm{arch}"))
            made_for[arch].compile([c for name in wanted[arch] for c in KERNELS[name]().calls(arch)])
        return made_for[arch]

    return of


@pytest.mark.parametrize(
    ("name", "arch"), [pytest.param(*row, marks=[] if row in FAST else [pytest.mark.slow]) for row in EVERY]
)
def test_kernels_as_they_ship(name: str, arch: int, compiled, monkeypatch) -> None:
    shipped, kernel = compiled(arch), KERNELS[name]()
    shipped.take_over(monkeypatch)
    kernel.check(arch)
    if arch in kernel.uses:
        texts = [shipped.text(c.kernel.name) for c in kernel.calls(arch)]
        assert any(re.search(kernel.uses[arch], text) for text in texts), f"no {kernel.uses[arch]}"
