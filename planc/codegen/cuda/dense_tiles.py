"""Tiles of products: in go an arch and a product, out come the tiles that may run it, or why one may not.

Rows or weights that are `ragged` do not allow accesses of 16 bytes: each element is loaded by itself, and the registers
of large tiles would not hold their addresses.

What a tile may depend on: BK on the weight alone, since it orders additions; all else on anything. On sm_90 and sm_100
at least 64 rows (channels, where operands are swapped) make every bucket use the same instruction, on the others any
multiple of 16 does. The sizes below are those that were seen to compile without spills in all their variants.
"""

from collections.abc import Iterator, Mapping

from planc.codegen.cuda.call import power_of_two
from planc.codegen.skus import SMS
from planc.compiler.ir.quant import SCHEMES
from planc.compiler.ir.types import DTYPES
from planc.plans.tuning import Product, Tile

WEIGHTS = ("f32", "bf16", *SCHEMES)  # that products have
ROWS = ("f32", "bf16", "i8", "f8e4m3")
BAND = 8  # tiles of rows that share the weights in the L2 cache
WARPGROUP = (90, 100)  # tensor cores take 64 rows at a time
# Bytes of shared memory that the stages of a tile may take; the arch's limit is higher, layouts are converted there.
_BUDGET = {80: 136 << 10, 86: 80 << 10, 89: 80 << 10, 90: 192 << 10, 100: 176 << 10, 120: 80 << 10}
_STAGES, _DEEP, _FEW = 5, 8, 3  # steps in flight: of most products, where blocks are few, so that more fit on an SM
_MOST_STAGES = 16

_Size = tuple[int, int, int]  # rows, channels, warps
_FLOATS: tuple[_Size, ...] = ((64, 64, 8), (32, 32, 4), (16, 32, 4))
_WGMMA: tuple[_Size, ...] = ((128, 128, 8), (128, 64, 8), (64, 64, 4), (64, 128, 8), (64, 32, 4))
# Where n and k leave no rest, whose masks take registers.
_WIDE: tuple[_Size, ...] = ((128, 256, 8),)
_WIDE_SWAPPED: tuple[_Size, ...] = ((128, 128, 8),)
_MMA: tuple[_Size, ...] = (
    (128, 128, 8), (64, 64, 8), (64, 128, 8), (64, 32, 8), (32, 64, 4), (32, 32, 4), (16, 64, 4), (16, 32, 4)
)  # fmt: skip
_SWAPPED: tuple[_Size, ...] = ((64, 128, 8), (32, 64, 4), (32, 128, 8), (16, 64, 4))
_RAGGED: tuple[_Size, ...] = ((64, 32, 8), (32, 32, 4), (16, 32, 4))
_RAGGED_WGMMA: tuple[_Size, ...] = ((64, 32, 4),)
_RAGGED_SWAPPED: tuple[_Size, ...] = ((32, 64, 4), (16, 64, 4))


# Registers of a thread by arch and kind of product, fitted to what the assembler takes: some, and for each sum and each
# code that is widened (`bytes`: of 8 bits) so many.
_REGISTERS: Mapping[int, Mapping[str, tuple[float, float, float]]] = {
    80: {
        "floats": (50, 2.7, 0), "exact": (60, 4, 0), "codes": (60, 4, 0),
        "bytes": (16, 2.3, 1), "widened": (20, 3, 1.6), "spread": (20, 3, 1.6),
    },
    90: {
        "floats": (50, 1.6, 0), "exact": (40, 1.5, 0), "codes": (32, 2.7, 0),
        "bytes": (16, 2.3, 1), "widened": (20, 3, 1.6), "spread": (20, 3, 1.6),
    },
    100: {
        "floats": (50, 0.8, 0), "exact": (40, 1.5, 0), "codes": (32, 2.7, 0),
        "bytes": (20, 0.5, 0.8), "widened": (20, 3, 1.6), "spread": (40, 1.5, 1.6),
    },
    120: {
        "floats": (36, 2, 0), "exact": (30, 2.2, 0), "codes": (30, 2.6, 0),
        "bytes": (16, 2.3, 1), "widened": (20, 3, 1.6), "spread": (20, 3, 1.6),
    },
}  # fmt: skip


def kind(p: Product) -> str:
    """`floats`, or of codes: `exact` (integers), `codes` (fp8), `widened` in registers, `spread` with their scales."""
    row = SCHEMES.get(p.weight)
    if row is None:
        return "floats"
    if row.act is not None:
        return "exact" if row.codes == "i8" else "codes"
    return "spread" if row.name == "mxfp4" else "widened"


def swapped(p: Product) -> bool:
    """Whether channels are the rows of its products."""
    return kind(p) in ("widened", "spread")


def x_bytes(p: Product) -> int:
    """Bytes of an element of the rows."""
    return DTYPES[p.x].itemsize


def weight_bits(p: Product) -> int:
    """Bits of an element of the weight, without scales."""
    row = SCHEMES.get(p.weight)
    return DTYPES[p.weight].itemsize * 8 if row is None else 4 if row.codes == "u4" else 8


def typical(p: Product) -> int:
    """Rows that one weight meets: of experts, twice the mean, since some are chosen more often."""
    return min(p.rows, -(-2 * p.rows // p.experts)) if p.experts else p.rows


def depth(p: Product) -> int:
    """BK. Steps of 64 where 128 would leave a rest, whose masks take registers; it divides the groups of scales."""
    form = kind(p)
    if form in ("exact", "codes"):
        return 64 if p.ragged or p.k % 128 else 128
    row = SCHEMES.get(p.weight)
    if p.weight == "f32" or (form == "widened" and row is not None and row.codes == "u4" and row.group == 32):
        return 32
    return 64


def candidates(arch: int, p: Product) -> tuple[Tile, ...]:
    """The tiles to choose from, those first that are taken where speed is equal."""
    most = power_of_two(typical(p))
    sizes = list(_sizes(arch, p))
    least = min(bm for bm, _, _ in sizes)
    fitting = [s for s in sizes if s[0] <= max(most, least)]
    return tuple(tile for size in fitting for tile in _staged(arch, p, size))


def _sizes(arch: int, p: Product) -> Iterator[_Size]:
    if p.weight == "f32":
        yield from _FLOATS[-1 if p.ragged else 0 :]
        return
    if swapped(p):
        yield from _RAGGED_SWAPPED if p.ragged else _SWAPPED
        if not p.ragged and weight_bits(p) == 8 and not p.experts and p.n % 128 == 0 and p.k % depth(p) == 0:
            yield from _WIDE_SWAPPED
        return
    if arch not in WARPGROUP:
        # Codes of 8 bits are put in order in registers before mma.sync takes them: 128 x 128 leaves no room.
        most = 128 if _BUDGET[arch] > 100 << 10 and weight_bits(p) > 8 else 64
        yield from (s for s in (_RAGGED if p.ragged else _MMA) if s[0] <= most)
        return
    if p.ragged:
        yield from _RAGGED_WGMMA
        return
    # On sm_100 each step's sum of fp8 comes from tensor memory: registers hold it beside the sum of all steps.
    two_sums = arch == 100 and weight_bits(p) == 8
    # Scales of groups are loaded in every step, beside the masks of a rest.
    masked = p.weight == "fp8-block" and (p.n % 128 or p.k % 128)
    yield from (s for s in _WGMMA if s[1] <= (64 if two_sums else 128) and not (masked and s[0] * s[1] > 128 * 64))
    if arch == 90 and kind(p) != "codes" and not p.experts and p.n % 256 == 0 and p.k % depth(p) == 0:
        yield from _WIDE


def _staged(arch: int, p: Product, size: _Size) -> Iterator[Tile]:
    """With some numbers of steps in flight, as many as there is shared memory for."""
    bm, bn, warps = size
    bk = depth(p)
    if p.ragged:
        yield Tile(bm, bn, bk, warps, 2)
        return
    if p.weight == "f32":
        yield Tile(bm, bn, bk, warps, 3)
        return
    most = max(2, _BUDGET[arch] // _step_bytes(p, bm, bn))
    # Where tensor cores read registers, a stage's values are there before its memory is filled again: one stage more.
    extra = 0 if arch in WARPGROUP or swapped(p) else 1
    wanted = [_STAGES, *([_DEEP] if bm * bn <= 64 * 64 else []), *([_FEW] if bm * bn >= 64 * 64 else [])]
    for stages in dict.fromkeys(min(n, most) for n in wanted):
        yield Tile(bm, bn, bk, warps, stages + extra)


def _step_bytes(p: Product, bm: int, bn: int) -> int:
    return depth(p) * (bm * x_bytes(p) * 8 + bn * weight_bits(p)) // 8


def shared(arch: int, p: Product, tile: Tile) -> int:
    """Bytes of shared memory, as the compiler was seen to take them; only what tensor cores read there stays a stage
    longer.
    """
    direct = 0
    if arch in WARPGROUP and kind(p) in ("exact", "codes"):
        direct = _step_bytes(p, tile.bm, tile.bn)
    elif arch in WARPGROUP and p.weight == "bf16":
        direct = tile.bn * tile.bk * 2
    return (tile.stages - 1) * _step_bytes(p, tile.bm, tile.bn) + direct


def registers(arch: int, p: Product, tile: Tile) -> int:
    """Registers of a thread, about: those of its sums and of the codes that it widens, and some."""
    form, threads = kind(p), 32 * tile.warps
    row = _REGISTERS[arch if arch in _REGISTERS else 80]
    some, of_sums, of_codes = row["bytes" if form == "widened" and weight_bits(p) == 8 else form]
    found = some + of_sums * tile.bm * tile.bn / threads + of_codes * tile.bn * tile.bk / threads
    return min(255, int(found))


def wrong(arch: int, p: Product, tile: Tile) -> str | None:
    """Why a tile may not run a product; None when it may, as far as can be told before it is compiled."""
    if tile.bk != depth(p):
        return (
            f"BK is {depth(p)} for this weight, not {tile.bk}: it orders additions, which must not depend on the tile"
        )
    sizes = {"BM": tile.bm, "BN": tile.bn, "warps": tile.warps}
    for name, size in sizes.items():
        if size < 1 or size & (size - 1):
            return f"{name} is {size}, expected a power of two"
    side, name = (tile.bn, "BN") if swapped(p) else (tile.bm, "BM")
    least = 64 if arch in WARPGROUP and p.weight != "f32" else 16
    if side < least:
        return f"{name} is {side}: below {least}, sm_{arch} would use another instruction, and add up otherwise"
    if min(tile.bm, tile.bn) < 16 or tile.warps not in (4, 8, 16):
        return f"{tile.bm} x {tile.bn} with {tile.warps} warps: a tile has 16 or more of each, and 4, 8 or 16 warps"
    if not 2 <= tile.stages <= _MOST_STAGES:
        return f"{tile.stages} stages, expected 2 to {_MOST_STAGES}"
    takes, has = shared(arch, p, tile), SMS[arch].shared_block
    if takes > has:
        return f"its stages take {takes} B of shared memory, and a block may have {has}"
    return None


def vector_warps(width: int) -> int:
    """Warps of a program that holds a vector of `width` elements in registers."""
    return 4 if width <= 2048 else 8 if width <= 8192 else 16 if width <= 32768 else 32
