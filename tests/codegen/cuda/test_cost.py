"""The cost model: never faster than memory or tensor cores allow, and bound by what bounds a product of that shape."""

from itertools import product

import pytest

from planc.codegen.cuda.call import arch_of
from planc.codegen.cuda.cost import BANDWIDTH, LAUNCH, RATE, cost, residents
from planc.codegen.cuda.dense_tiles import candidates
from planc.codegen.cuda.tiles import Choice, Tiles
from planc.codegen.skus import skus
from planc.plans.tuning import Product, Tile

SHAPES = [(6144, 4096), (4096, 14336), (512, 2048), (200, 72)]


def chosen(gpu: str, p: Product) -> Choice:
    return Tiles(skus()[gpu]).choose(p)


def fp8(n: int, k: int, rows: int) -> Product:
    return Product("qlinear", "f8e4m3", "fp8", n, k, rows)


def bf16(n: int, k: int, rows: int) -> Product:
    return Product("linear", "f32", "bf16", n, k, rows)


@pytest.mark.parametrize("gpu", skus().values(), ids=lambda gpu: gpu.name)
def test_no_tile_beats_memory_or_tensor_cores(gpu) -> None:
    for (n, k), rows in product(SHAPES, (1, 48, 2048)):
        p = bf16(n, k, rows)
        moved = 2 * n * k + 4 * rows * (n + k)
        least = max(
            moved / (gpu.bandwidth_gbs * 1e9 * BANDWIDTH), 2 * n * k * rows / (gpu.tflops["bf16"] * 1e12 * RATE)
        )
        for tile in candidates(arch_of(gpu.sm.number), p):
            assert cost(gpu, p, tile).seconds >= max(least, LAUNCH), (p, tile)


def test_decode_is_bound_by_memory_and_prefill_by_tensor_cores() -> None:
    decode = chosen("h100-sxm", fp8(28672, 4096, 8)).cost
    assert decode.bound == "memory"
    assert decode.seconds == pytest.approx(28672 * 4096 / (3350e9 * 0.9), rel=0.06)
    prefill = chosen("a100-80g", bf16(28672, 4096, 2048)).cost
    assert prefill.bound == "tensor cores"
    assert prefill.seconds == pytest.approx(2 * 28672 * 4096 * 2048 / (312e12 * 0.8), rel=0.1)
    assert chosen("h20", bf16(28672, 4096, 512)).cost.bound == "tensor cores", "many bytes a second, few products"
    assert chosen("h100-sxm", bf16(64, 64, 1)).cost.bound == "launches"
    widened = chosen("h100-sxm", Product("qlinear", "f32", "f32", 4096, 4096, 64)).cost
    assert widened.bound == "CUDA cores"


def test_steps_in_flight_hide_latency() -> None:
    gpu, p = skus()["h100-sxm"], fp8(2560, 8192, 1)
    few, many = (cost(gpu, p, Tile(64, 32, 128, 4, stages)) for stages in (3, 8))
    assert few.bound == "latency"
    assert few.seconds > 2 * many.seconds
    assert chosen("h100-sxm", p).tile.stages == 8


def test_few_channels_are_cut_finer_so_that_every_sm_has_work() -> None:
    assert chosen("h100-sxm", bf16(4096, 4096, 8)).tile.bn == 32
    assert chosen("h100-sxm", bf16(4096, 4096, 8)).cost.busy == 128 / 132
    assert cost(skus()["h100-sxm"], bf16(4096, 4096, 8), Tile(64, 64, 64, 4, 5)).busy == 64 / 132
    assert chosen("a100-80g", bf16(3072, 4096, 8)).tile.bn == 32, "96 blocks on 108 SMs, not 48"
    assert chosen("h100-sxm", bf16(28672, 4096, 8)).tile.bn == 64


def test_rows_of_experts_that_nobody_chose_cost_nothing() -> None:
    gpu, tile = skus()["h200"], Tile(64, 64, 128, 4, 5)
    few, all_of_them, one = (
        cost(gpu, Product("qexpert_linear", "f8e4m3", "fp8", 1536, 4096, rows, experts), tile).seconds
        for rows, experts in ((8, 128), (128, 128), (8, 0))
    )
    assert few == pytest.approx(8 * 1536 * 4096 / (4800e9 * 0.9), rel=0.3)
    assert all_of_them > 10 * few > 10 * one


def test_blocks_of_an_sm_are_those_that_fit_its_registers_and_shared_memory() -> None:
    p = bf16(4096, 4096, 64)
    # 4 x 24 KiB + 8 KiB of 228 KiB; then two stages of it, where 101 registers of 128 threads are the limit.
    assert residents(skus()["h100-sxm"], p, Tile(64, 64, 64, 4, 5)) == 2
    assert residents(skus()["h100-sxm"], p, Tile(64, 64, 64, 4, 2)) == 4
    assert residents(skus()["l4"], p, Tile(64, 64, 64, 8, 4)) == 1
