"""Matrix instructions against layouts spelt out as the PTX manual has them, element by element."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from planc.emulator.machine import KernelFault
from planc.emulator.run import run_kernel
from tests.emulator.snippet import entry

RNG = np.random.default_rng(0)
LANE = np.arange(32)
GROUP, MEMBER = LANE // 4, LANE % 4
KINDS = {
    "bf16": (ml_dtypes.bfloat16, 16),
    "f16": (np.float16, 16),
    "e4m3": (ml_dtypes.float8_e4m3fn, 32),
    "e5m2": (ml_dtypes.float8_e5m2, 32),
    "s8": (np.int8, 32),
    "u8": (np.uint8, 32),
}


def values(kind: str, *shape: int) -> np.ndarray:
    dtype = KINDS[kind][0]
    if kind in ("s8", "u8"):
        return RNG.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, shape).astype(dtype)
    return RNG.standard_normal(shape).astype(dtype)


def left_fragment(a: np.ndarray) -> np.ndarray:
    """Registers [lane, 4] of A [16, K]: row and column of element i, by the manual."""
    per = 4 // a.itemsize  # elements of a register
    i = np.arange(4 * per)
    row = GROUP[:, None] + np.where((i // per) % 2 == 0, 0, 8)
    column = MEMBER[:, None] * per + i % per + np.where(i < 2 * per, 0, 4 * per)
    return np.ascontiguousarray(a[row, column]).view(np.uint32)


def right_fragment(b: np.ndarray) -> np.ndarray:
    """Registers [lane, 2] of B [K, 8]."""
    per = 4 // b.itemsize
    i = np.arange(2 * per)
    row = MEMBER[:, None] * per + i % per + np.where(i < per, 0, 4 * per)
    return np.ascontiguousarray(b[row, GROUP[:, None]]).view(np.uint32)


def out_matrix(registers: np.ndarray) -> np.ndarray:
    """D [16, 8] of registers [lane, 4]."""
    i = np.arange(4)
    d = np.empty((16, 8), registers.dtype)
    d[GROUP[:, None] + np.where(i < 2, 0, 8), MEMBER[:, None] * 2 + i % 2] = registers
    return d


def load(pointer: int, first: int, count: int) -> str:
    lines = f"ld.param.u64 %l1, [k_param_{pointer}]; mad.wide.u32 %l1, %r1, {4 * count}, %l1;"
    return lines + "".join(f"ld.global.b32 %r{first + n}, [%l1+{4 * n}];" for n in range(count))


def store(pointer: int, first: int, count: int) -> str:
    lines = f"ld.param.u64 %l1, [k_param_{pointer}]; mad.wide.u32 %l1, %r1, {4 * count}, %l1;"
    return lines + "".join(f"st.global.b32 [%l1+{4 * n}], %r{first + n};" for n in range(count))


@pytest.mark.parametrize("kind", KINDS)
def test_mma(kind: str) -> None:
    _, k = KINDS[kind]
    out = "s32" if kind in ("s8", "u8") else "f32"
    a, b = values(kind, 16, k), values(kind, k, 8)
    c = RNG.integers(-9, 9, (32, 4)).astype(np.int32 if out == "s32" else np.float32)
    d = np.zeros_like(c)
    product = f"mma.sync.aligned.m16n8k{k}.row.col.{out}.{kind}.{kind}.{out}"
    body = "mov.u32 %r1, %tid.x;" + load(0, 10, 4) + load(1, 20, 2) + load(2, 30, 4)
    body += (
        f"{product} {{%r40, %r41, %r42, %r43}}, {{%r10, %r11, %r12, %r13}}, {{%r20, %r21}}, {{%r30, %r31, %r32, %r33}};"
    )
    run_kernel(entry(body + store(3, 40, 4), [".u64"] * 4), (1, 1, 1), [left_fragment(a), right_fragment(b), c, d], 0)
    exact = a.astype(np.float64) @ b.astype(np.float64) + out_matrix(c)
    np.testing.assert_allclose(out_matrix(d), exact, rtol=1e-5, atol=1e-4)
    if out == "s32":
        assert (out_matrix(d) == exact).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_from_and_to_shared_memory(transposed: bool) -> None:
    """Lane l holds elements 2(l%4) and the next of row l/4 of each matrix; transposed, of column l/4."""
    stored = RNG.integers(0, 1 << 16, (4, 8, 8)).astype(np.uint16)
    out, back = np.zeros((32, 4), np.uint32), np.zeros((32, 4), np.uint32)
    trans = ".trans" if transposed else ""
    body = "mov.u32 %r1, %tid.x;" + load(0, 10, 4)
    body += "shl.b32 %r2, %r1, 4; st.shared.v4.b32 [%r2], {%r10, %r11, %r12, %r13};"
    body += f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r20, %r21, %r22, %r23}}, [%r2];" + store(1, 20, 4)
    body += f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r2+512], {{%r20, %r21, %r22, %r23}};"
    body += "ld.shared.v4.b32 {%r30, %r31, %r32, %r33}, [%r2+512];" + store(2, 30, 4)
    rows = np.ascontiguousarray(stored.reshape(32, 8)).view(np.uint32)
    run_kernel(entry(body, [".u64"] * 3), (1, 1, 1), [rows, out, back], 1024)
    matrices = stored.swapaxes(1, 2) if transposed else stored
    expected = matrices[:, GROUP[:, None], MEMBER[:, None] * 2 + np.arange(2)]  # matrix, lane, element
    assert out.view(np.uint16).reshape(32, 4, 2).swapaxes(0, 1).tolist() == expected.tolist()
    assert back.tolist() == rows.tolist()


def swizzled(row: np.ndarray, column: np.ndarray, size: int) -> np.ndarray:
    """Byte of an element of a tile with rows of 128 bytes, 16-byte pieces mixed by the last three bits of the row."""
    at = column * size
    return row // 8 * 1024 + row % 8 * 128 + ((at // 16) ^ (row % 8)) * 16 + at % 16


def tile_k_fast(matrix: np.ndarray) -> np.ndarray:
    """Bytes of [rows, 128 bytes] as wgmma reads them."""
    row, column = np.indices(matrix.shape)
    out = np.zeros(matrix.nbytes, np.uint8).view(matrix.dtype)
    out[swizzled(row, column, matrix.itemsize) // matrix.itemsize] = matrix
    return out.view(np.uint8)


def tile_k_slow(matrix: np.ndarray) -> np.ndarray:
    """Bytes of [K, n] of 16-bit elements, 64 columns a part."""
    parts = [tile_k_fast(matrix[:, n : n + 64]) for n in range(0, matrix.shape[1], 64)]
    return np.concatenate(parts)


def descriptor(address: int, leading: int, stride: int) -> int:
    """A wgmma descriptor of a tile that is swizzled by 128 bytes."""
    return address >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 62


def group_matrix(registers: np.ndarray, n: int) -> np.ndarray:
    """D [64, n] of registers [128 threads, n/2]: warp w has rows 16w.., as mma.sync lays out each 8 columns."""
    thread, i = np.indices(registers.shape)
    lane = thread % 32
    d = np.zeros((64, n), registers.dtype)
    d[thread // 32 * 16 + lane // 4 + 8 * (i // 2 % 2), i // 4 * 8 + lane % 4 * 2 + i % 2] = registers
    return d


def wgmma(kind: str, n: int, tile: np.ndarray, operands: str, registers: np.ndarray | None = None) -> np.ndarray:
    """D of one product; `tile` is what shared memory holds."""
    _, k = KINDS[kind]
    out = "s32" if kind == "s8" else "f32"
    d = np.ones((128, n // 2), np.int32 if out == "s32" else np.float32)
    pieces = -(-len(tile) // (128 * 16))
    data = np.zeros(pieces * 128 * 16, np.uint8)
    data[: len(tile)] = tile
    body = "mov.u32 %r1, %tid.x; ld.param.u64 %l2, [k_param_0]; mad.wide.u32 %l2, %r1, 16, %l2; shl.b32 %r2, %r1, 4;"
    for p in range(pieces):
        body += f"ld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%l2+{2048 * p}];"
        body += f"st.shared.v4.b32 [%r2+{2048 * p}], {{%r3, %r4, %r5, %r6}};"
    body += "bar.sync 0;" + load(1, 10, n // 2) + (load(2, 60, 4) if registers is not None else "")
    regs = ", ".join(f"%r{10 + i}" for i in range(n // 2))
    body += f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{out}.{kind}.{kind} {{{regs}}}, {operands};"
    body += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" + store(1, 10, n // 2)
    arrays = [data, d, *([registers] if registers is not None else [])]
    run_kernel(entry(body, [".u64"] * len(arrays), 128), (1, 1, 1), arrays, len(data))
    return group_matrix(d, n)


@pytest.mark.parametrize("kind", ["bf16", "e4m3", "s8"])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_wgmma_of_swizzled_tiles(kind: str, step: int) -> None:
    """Both operands in shared memory, K fast; `step` K-steps into rows of 128 bytes."""
    dtype, k = KINDS[kind]
    width, n = 128 // np.dtype(dtype).itemsize, 32
    a, b = values(kind, 64, width), values(kind, n, width)
    tile = np.concatenate([tile_k_fast(a), tile_k_fast(b)])
    where = [descriptor(base + 32 * step, 16, 1024) for base in (0, 8192)]
    integers = "" if kind == "s8" else ", 1, 1" + (", 0, 0" if kind == "bf16" else "")
    body = f"{where[0]}, {where[1]}, 1{integers}"
    here = slice(step * k, step * k + k)
    exact = a[:, here].astype(np.float64) @ b[:, here].astype(np.float64).T + 1
    np.testing.assert_allclose(wgmma(kind, n, tile, body), exact, rtol=1e-5, atol=1e-4)


def test_wgmma_of_a_tile_whose_k_is_slow() -> None:
    """B [K, N] with N fast, as a product with an untransposed matrix has it; D is not added to."""
    a, b = values("bf16", 64, 64), values("bf16", 16, 64)
    tile = np.concatenate([tile_k_fast(a), tile_k_slow(b)])
    body = f"{descriptor(0, 16, 1024)}, {descriptor(8192, 2048, 1024)}, 0, 1, 1, 0, 1"
    exact = a[:, :16].astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(wgmma("bf16", 64, tile, body), exact, rtol=1e-5, atol=1e-4)


def test_wgmma_with_a_in_registers_and_subtracted() -> None:
    a, b = values("bf16", 64, 16), values("bf16", 32, 64)
    registers = np.concatenate([left_fragment(a[16 * w : 16 * w + 16]) for w in range(4)])
    body = f"{{%r60, %r61, %r62, %r63}}, {descriptor(0, 16, 1024)}, 1, -1, 1, 0"
    exact = 1 - a.astype(np.float64) @ b[:, :16].astype(np.float64).T
    np.testing.assert_allclose(wgmma("bf16", 32, tile_k_fast(b), body, registers), exact, rtol=1e-5, atol=1e-4)


def test_wgmma_beyond_shared_memory() -> None:
    body = f"{descriptor(0, 16, 1024)}, {descriptor(8192, 16, 1024)}, 1, 1, 1, 0, 0"
    with pytest.raises(KernelFault, match=r"a matrix ends at byte .* of 8192 in shared memory"):
        wgmma("bf16", 32, tile_k_fast(values("bf16", 64, 64)), body)
