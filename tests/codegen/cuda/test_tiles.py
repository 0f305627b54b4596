"""The choice of tiles: BK and the kind of instruction are the weight's; what was measured goes first, by the rules."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from planc.codegen.cuda import aot, cubin
from planc.codegen.cuda.call import ARCHES, TritonKernel, arch_of
from planc.codegen.cuda.dense_tiles import candidates, registers, shared, wrong
from planc.codegen.cuda.tiles import Tiles, default_gpu, tiles_for
from planc.codegen.skus import SMS, skus
from planc.codegen.target import parse
from planc.errors import UsageError
from planc.plans.launches import Binary
from planc.plans.tuning import Entry, Product, Tile, Tuning
from tests.codegen.cuda.harness import made, run
from tests.codegen.cuda.test_compiled import emulated, quantized
from tests.codegen.cuda.test_compiled import product as product_of
from tests.codegen.cuda.test_dense import row_types, weight_types
from tests.kernels.harness import Case, assert_same_bits, case, f32, tensor

FORMS = {
    "f32": "f32", "bf16": "f32", "int8": "i8", "fp8": "f8e4m3", "fp8-block": "f8e4m3",
    "int8-wo": "f32", "awq": "f32", "awq-g32": "f32", "mxfp4": "f32",
}  # fmt: skip
PRODUCT = Product("qlinear", "f8e4m3", "fp8", 4096, 4096, 16)
TILE = Tile(64, 128, 128, 8, 3)


def products(weight: str) -> list[Product]:
    sizes = product((40, 4096), (72, 4096), (1, 40, 2048), (0, 8), (False, True))
    return [Product("linear", FORMS[weight], weight, n, k, rows, e, ragged) for n, k, rows, e, ragged in sizes]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("weight", FORMS)
def test_every_candidate_keeps_the_rules(weight: str, arch: int) -> None:
    for p in products(weight):
        tiles = candidates(arch, p)
        assert len({t.bk for t in tiles}) == 1
        assert len(set(tiles)) == len(tiles) <= 18
        assert [wrong(arch, p, t) for t in tiles] == [None] * len(tiles), p
        assert {t.bk for t in candidates(arch, replace(p, rows=7))} == {t.bk for t in tiles}


def test_a_tile_is_chosen_the_same_way_every_time_and_gpus_of_an_sm_share_most() -> None:
    shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
    asked = [replace(PRODUCT, n=n, k=k, rows=1 << bit) for (n, k), bit in product(shapes, range(12))]
    tiles = {name: [Tiles(skus()[name]).choose(p).tile for p in asked] for name in ("h100-sxm", "h200", "h20")}
    assert tiles["h100-sxm"] == [Tiles(skus()["h100-sxm"]).choose(p).tile for p in reversed(asked)][::-1]
    assert len(set(tiles["h100-sxm"])) <= 7
    assert len(set(tiles["h200"]) - set(tiles["h100-sxm"])) <= 2, "kernels of another GPU of the SM"
    assert tiles["h20"] != tiles["h100-sxm"], "which has seven times the products a second"


def test_an_sm_alone_has_a_gpu_whose_figures_choose() -> None:
    for number in SMS:
        assert default_gpu(number).sm.number == number
    assert tiles_for(parse("sm_90a")).gpu.name == "h100-sxm"
    assert tiles_for(parse("h20")).gpu.name == "h20"


def tuning(*tiles: Tile, target: str = "h200") -> Tuning:
    return Tuning(tuple(Entry(target, replace(PRODUCT, rows=n + 1), t, 9.0) for n, t in enumerate(tiles)))


def test_what_was_measured_goes_before_the_model() -> None:
    tiles = tiles_for(parse("h200"), tuning(TILE))
    found = tiles.choose(replace(PRODUCT, rows=1))
    assert (found.tile, found.measured) == (TILE, True)
    assert found.cost.seconds > 0
    assert tiles.choose(PRODUCT) == Tiles(skus()["h200"]).choose(PRODUCT)
    assert not tiles_for(parse("h100-sxm"), tuning(TILE)).choose(replace(PRODUCT, rows=1)).measured


@pytest.mark.parametrize(
    ("tile", "told"),
    [
        (replace(TILE, bk=64), "BK is 128 for this weight, not 64: it orders additions"),
        (replace(TILE, bm=32), "BM is 32: below 64, sm_90 would use another instruction"),
        (replace(TILE, bn=96), "BN is 96, expected a power of two"),
        (replace(TILE, bm=256, bn=256, stages=6), r"take 393216 B of shared memory, and a block may have 232448"),
        (replace(TILE, warps=2), "64 x 128 with 2 warps"),
        (replace(TILE, stages=1), "1 stages, expected 2 to 16"),
    ],
)
def test_a_measured_tile_that_breaks_the_rules_is_named(tile: Tile, told: str) -> None:
    with pytest.raises(
        UsageError, match=r"entry for qlinear of 2 rows of f8e4m3 by fp8 \[4096, 4096\] on h200 .*" + told
    ):
        tiles_for(parse("h200"), tuning(TILE, tile))
    tiles_for(parse("l4"), tuning(TILE, tile))


def test_an_entry_of_no_product_is_refused() -> None:
    wrong = Entry("l4", replace(PRODUCT, weight="int3"), TILE, 1.0)
    with pytest.raises(UsageError, match=r"by int3 .* names no product"):
        tiles_for(parse("l4"), Tuning((wrong,)))


def kernel_of(name: str, arch: int, rows: int) -> tuple[TritonKernel, Product, Tile]:
    n = k = 4096
    if name == "bf16":
        c = case("linear", f32("T", k), tensor("bf16", n, k))
    else:
        c = Case("qlinear", (*row_types(name, "T", k), *weight_types(name, n, k)), (("scheme", name),))
    (call,) = made(c, arch, rows)
    assert call.choice is not None
    return call.kernel, call.choice.product, call.choice.tile


def compiled(found: list[tuple[TritonKernel, Product, Tile]], arch: int, folder: Path) -> None:
    """The gate passes them, and what the model took for their shared memory and registers is near."""
    binaries: dict[str, Binary] = {b.name: b for b in aot.compile([k for k, _, _ in found], arch, folder)}
    for kernel, p, tile in found:
        binary = binaries[kernel.name]
        taken = cubin.read((folder / f"{kernel.name}.cubin").read_bytes()).kernels[binary.entry].registers
        assert shared(arch_of(arch), p, tile) == pytest.approx(binary.shared, rel=0.35), (p, tile)
        assert registers(arch_of(arch), p, tile) == pytest.approx(taken, rel=0.4), (p, tile)


def test_the_model_knows_what_a_kernel_takes(tmp_path: Path) -> None:
    compiled([kernel_of("bf16", 90, 16)], 90, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_chosen_tiles_compile_and_pass_the_gate(arch: int, tmp_path: Path) -> None:
    names = [n for n in FORMS if n != "f32" and not (n.startswith("fp8") and arch in (80, 86))]
    found = {k[0].name: k for name in names for rows in (1, 32, 64, 256, 2048) for k in [kernel_of(name, arch, rows)]}
    compiled(list(found.values()), arch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100, 120])
@pytest.mark.parametrize("name", [n for n in FORMS if n != "f32"])
def test_every_tile_gives_the_same_bits(name: str, arch: int, tmp_path: Path) -> None:
    if name.startswith("fp8") and arch == 80:
        pytest.skip("no products of fp8")
    c, arrays = product_of(130, 256, 256) if name == "bf16" else quantized(name, 130)
    chosen = made(c, arch, 130)[0].choice
    assert chosen is not None
    tiles = {(t.bm, t.bn): t for t in reversed(candidates(arch, chosen.product))}
    assert len(tiles) >= 3
    cut = {size: Tiles.default(arch).with_tile(chosen.product, t) for size, t in tiles.items()}
    aot.compile([made(c, arch, 130, tiles=t)[0].kernel for t in cut.values()], arch, tmp_path / str(arch))
    bits = {size: run(c, arrays, arch, runner=emulated(tmp_path, arch), tiles=t)[0] for size, t in cut.items()}
    first = next(iter(bits.values()))
    for size, got in bits.items():
        assert_same_bits(got, first, f"{name} on sm_{arch} in tiles of {size}")
