"""What a product should take in tiles: in go a GPU, a product and a tile, out come seconds and what bounds them.

Blocks are dealt to SMs as evenly as they go, and an SM holds as many at once as its registers, shared memory and warps
have room for. The busiest SM then needs the longest of: its part of the memory's bytes, its loads from L2, the latency
of loads that too few stages hide, tensor cores, the shared memory that feeds them, and CUDA cores. It ranks tiles; of
the time itself expect 30 %.
"""

from dataclasses import dataclass

from planc.codegen.cuda.call import arch_of
from planc.codegen.cuda.dense_tiles import BAND, WARPGROUP, kind, registers, shared, swapped, weight_bits, x_bytes
from planc.codegen.skus import SKU
from planc.compiler.ir.quant import SCHEMES
from planc.plans.tuning import Product, Tile

# What large products and copies reach of the published rates, measured on an H200: 769-798 of 989 TFLOP/s in bf16, 4.3
# of 4.8 TB/s.
RATE, BANDWIDTH = 0.8, 0.9
LAUNCH = 2e-6  # seconds that a kernel in a graph takes at least
_CLOCK = 1.7e9  # of an SM, about
_SHARED, _LANES = 128 * _CLOCK, 128 * _CLOCK  # an SM's bytes of shared memory and operations, as published
# The rest is assumed, and planc tune prints what it leads to beside what it measures. An SM gets 64 bytes a cycle from
# L2, half of it where all SMs load; seconds until a load is there, while others are on their way.
_L2 = 32 * _CLOCK
_FROM_L2, _FROM_MEMORY = 0.3e-6, 0.8e-6
_WARPS, _FEW = 8, 0.7  # of an SM that keep its tensor cores busy, and the share of the rate that fewer reach
_WIDEN = {"widened": 4, "spread": 10}  # operations a code until it is bf16
_POWERS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Cost:
    """Seconds of the work, the resource that they are due to, and the share of SMs that have a block."""

    work: float
    due: str
    busy: float

    @property
    def seconds(self) -> float:
        """Of the launch."""
        return max(self.work, LAUNCH)

    @property
    def bound(self) -> str:
        """What the launch cannot be faster than."""
        return self.due if self.work > LAUNCH else "launches"


@dataclass(frozen=True)
class _Work:
    """A product cut in tiles: active weights, tiles of rows and of channels, rows of a tile that there are."""

    weights: int
    down: int
    across: int
    rows: float

    @property
    def blocks(self) -> int:
        return self.down * self.across


def cost(gpu: SKU, p: Product, tile: Tile) -> Cost:
    """The time of one launch, and what bounds it: memory, L2, latency, tensor cores, shared memory, CUDA cores, or
    launches where the launch itself takes longer.
    """
    work = _cut(p, tile)
    resident = residents(gpu, p, tile)
    share = -(-work.blocks // gpu.sms)  # blocks of the busiest SM
    rounds = -(-share // resident)
    wait = _FROM_L2 + (_FROM_MEMORY - _FROM_L2) * work.weights / work.down  # each comes from memory once
    steps = -(-p.k // tile.bk)
    took = {
        "memory": _moved(gpu, p, work) / (gpu.bandwidth_gbs * 1e9 * BANDWIDTH),
        "L2": max(share / 2, work.blocks / gpu.sms) * _loaded(p, tile, work) / _L2,
        "latency": rounds * ((steps - 1) // (tile.stages - 1)) * wait,
        **_computed(gpu, p, tile, share, min(share, resident) * tile.warps),
    }
    due = max(took, key=lambda name: took[name])
    # The first loads of a block hide behind nothing.
    return Cost(took[due] + rounds * wait, due, min(1.0, work.blocks / gpu.sms))


def residents(gpu: SKU, p: Product, tile: Tile) -> int:
    """Blocks that an SM holds at once, by the registers and the shared memory that a tile should take."""
    arch = arch_of(gpu.sm.number)
    return max(1, gpu.sm.resident(32 * tile.warps, registers(arch, p, tile), shared(arch, p, tile)))


def _cut(p: Product, tile: Tile) -> _Work:
    """Rows spread evenly over the experts that have any."""
    weights = min(p.experts, p.rows) if p.experts else 1
    down = weights * -(-p.rows // (weights * tile.bm))
    return _Work(weights, down, -(-p.n // tile.bn), p.rows / down)


def _channel_bytes(p: Product) -> float:
    """Bytes of a channel's codes and scales, a k."""
    row = SCHEMES.get(p.weight)
    return (weight_bits(p) + (row.scale_bits if row is not None else 0)) / 8


def _moved(gpu: SKU, p: Product, work: _Work) -> float:
    """Bytes between memory and L2: weights once a band of tiles where L2 does not keep them all, rows, results."""
    weights = work.weights * p.n * p.k * _channel_bytes(p)
    bands = -(-work.down // work.weights // BAND) if weights > gpu.l2_mb * 0.5e6 else 1
    return weights * bands + p.rows * (p.k * x_bytes(p) + 4 * p.n)


def _loaded(p: Product, tile: Tile, work: _Work) -> float:
    """Bytes that a block loads."""
    return p.k * (work.rows * x_bytes(p) + tile.bn * _channel_bytes(p))


def _computed(gpu: SKU, p: Product, tile: Tile, share: int, warps: int) -> dict[str, float]:
    """Seconds of the busiest SM's products, of what feeds its tensor cores, and of what its CUDA cores do beside them.

    All of a tile is multiplied, whether there are rows for it or not.
    """
    area = tile.bm * tile.bn
    if p.weight == "f32":
        return {"CUDA cores": share * area * p.k / _LANES}
    rate = gpu.tflops.get({"exact": "int8", "codes": "fp8"}.get(kind(p), "bf16"), gpu.tflops["bf16"]) * 1e12 / gpu.sms
    busy = 1.0 if warps >= _WARPS else _FEW
    return {
        "tensor cores": share * 2 * area * p.k / (rate * RATE * busy),
        "shared memory": share * p.k * _fed(gpu, p, tile) / _SHARED,
        "CUDA cores": share * p.k * _operations(p, tile) / _LANES,
    }


def _fed(gpu: SKU, p: Product, tile: Tile) -> float:
    """Bytes of shared memory that are written, and read by tensor cores, for each k: warps that share a tile read its
    sides again. Codes that are widened go there as they are.
    """
    x, w = 1.0 if kind(p) in ("exact", "codes") else 2.0, weight_bits(p) / 8
    rows, columns = (tile.bn * w, tile.bm * x) if swapped(p) else (tile.bm * x, tile.bn * w)
    arch, side = arch_of(gpu.sm.number), tile.bn if swapped(p) else tile.bm
    if arch == 100:  # its tensor cores read for all warps together
        return 2 * (rows + columns)
    parties, least = (tile.warps // 4, 64) if arch in WARPGROUP else (tile.warps, 16)
    down = [n for n in _POWERS if n <= min(parties, max(1, side // least))]
    return rows + columns + min(rows * (parties // n) + columns * n for n in down)


def _operations(p: Product, tile: Tile) -> float:
    """Operations of CUDA cores for each k: rows to bf16, codes widened, sums of steps scaled and added."""
    rounded = tile.bm if x_bytes(p) == 4 else 0
    row = SCHEMES.get(p.weight)
    apart = kind(p) == "codes" or (kind(p) == "widened" and row is not None and row.group is not None)
    return rounded + _WIDEN.get(kind(p), 0) * tile.bn + (2 * tile.bm * tile.bn / tile.bk if apart else 0)
