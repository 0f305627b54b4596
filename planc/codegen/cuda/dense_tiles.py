"""Tiles of products: in go an arch, what is multiplied and how many rows, out come the tile's sizes, warps and stages.

Rows or weights that are `ragged` do not allow accesses of 16 bytes: each element is loaded by itself, and the registers
of large tiles would not hold their addresses.

The one place that chooses. What a choice may depend on: BK on the weight alone, since it orders additions; BM on the
rows of the bucket. On sm_90 and sm_100 at least 64 rows (channels, where operands are swapped) make every bucket use
the same instruction, on the others any multiple of 16 does.
"""

from dataclasses import dataclass

from planc.codegen.cuda.call import power_of_two

BAND = 8  # tiles of rows that share the weights in the L2 cache
_WARPGROUP = (90, 100)  # tensor cores take 64 rows at a time
# Bytes of shared memory that the stages of a tile may take; the arch's limit is higher, layouts are converted there.
_BUDGET = {80: 136 << 10, 86: 80 << 10, 89: 80 << 10, 90: 192 << 10, 100: 176 << 10, 120: 80 << 10}
_FULL = 128  # programs that keep most GPUs busy
_MAX_STAGES = 5


@dataclass(frozen=True)
class Tile:
    """BM rows by BN channels in steps of BK, by `warps` warps, with `stages` steps in flight."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int


def floats(arch: int, rows: int, n: int, x_bytes: int, w_bytes: int, *, ragged: bool) -> Tile:
    """x times a weight of bf16, or of f32, which has no tensor cores."""
    if w_bytes == 4:
        bm = _step(rows, 16, 16 if ragged else 64)
        return Tile(bm, 64 if bm == 64 else 32, 32, 8 if bm == 64 else 4, 2 if ragged else 3)
    return _rows_first(arch, rows, n, 64, x_bytes, w_bytes, ragged)


def codes(arch: int, rows: int, n: int, k: int, *, ragged: bool) -> Tile:
    """Codes of 8 bits times codes of 8 bits; steps of 64 where 128 would leave a rest, whose masks take registers."""
    return _rows_first(arch, rows, n, 64 if ragged or k % 128 else 128, 1, 1, ragged)


def widened(arch: int, rows: int, x_bytes: int, code_bits: int, group: int | None, *, ragged: bool) -> Tile:
    """x times codes that are widened in registers; rows are the columns of its products. BK divides the group."""
    return _channels_first(arch, rows, 32 if code_bits == 4 and group == 32 else 64, x_bytes, code_bits, ragged)


def spread(arch: int, rows: int, x_bytes: int, *, ragged: bool) -> Tile:
    """Like `widened`, where scales of small groups widen with the codes: BK is a multiple of the group."""
    return _channels_first(arch, rows, 64, x_bytes, 4, ragged)


def _rows_first(arch: int, rows: int, n: int, bk: int, x_bytes: int, w_bytes: int, ragged: bool) -> Tile:
    # Codes of 8 bits are put in order in registers before mma.sync takes them: a tile of 128 x 128 leaves no room.
    most = 128 if arch in _WARPGROUP or (_BUDGET[arch] > 100 << 10 and w_bytes > 1) else 64
    bm = _step(rows, 64 if arch in _WARPGROUP else 16, most)
    narrow = 32 if -(-n // 64) < _FULL else 64
    # On sm_100 each step's sum of fp8 comes from tensor memory: registers hold it beside the sum of all steps.
    two_sums = arch == 100 and w_bytes == 1
    bn = narrow if rows <= 64 else 64 if two_sums else 128
    if ragged:
        bm, bn = min(bm, 64), 32
    full = 128 * 64 if two_sums else 128 * 128
    wide = bm * bn >= full if arch in _WARPGROUP else bm >= 64  # by what registers a thread has
    # Where tensor cores read registers, a stage's values are there before its memory is filled again: one stage more.
    extra = 0 if arch in _WARPGROUP else 1
    stages = _stages(arch, bm * bk * x_bytes + bn * bk * w_bytes) + extra
    return Tile(bm, bn, bk, 8 if wide else 4, 2 if ragged else stages)


def _channels_first(arch: int, rows: int, bk: int, x_bytes: int, code_bits: int, ragged: bool) -> Tile:
    bm = _step(rows, 16, 32 if ragged else 64)
    bn = 64 if bm < 64 else 128
    warps = 8 if bm == 64 else 4
    stages = _stages(arch, bm * bk * x_bytes + bn * bk * code_bits // 8)
    return Tile(bm, bn, bk, warps, 2 if ragged else stages)


def _step(rows: int, least: int, most: int) -> int:
    """The least power of two that holds the rows, within bounds."""
    return min(max(power_of_two(rows), least), most)


def _stages(arch: int, step_bytes: int) -> int:
    return max(2, min(_MAX_STAGES, _BUDGET[arch] // step_bytes))


def vector_warps(width: int) -> int:
    """Warps of a program that holds a vector of `width` elements in registers."""
    return 4 if width <= 2048 else 8 if width <= 8192 else 16 if width <= 32768 else 32
