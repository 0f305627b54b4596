"""Products in tensor memory against layouts spelt out as the PTX manual has them, and what must not be done there."""

from __future__ import annotations

import re

import numpy as np
import pytest

from planc.emulator.machine import KernelFault
from planc.emulator.run import run_kernel
from planc.errors import PlancError
from tests.emulator.snippet import entry
from tests.emulator.test_tensor import KINDS, tile_k_fast, tile_k_slow, values

THREADS = np.arange(128)
CODES = {"bf16": ("f16", 1), "f16": ("f16", 0), "e4m3": ("f8f6f4", 0), "e5m2": ("f8f6f4", 1), "s8": ("i8", 1)}
BARRIER, ADDRESS = 32768, 32776  # bytes of shared memory, behind the operands
WAIT = f"WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p5, [{BARRIER}], 0; @!%p5 bra WAIT; bar.sync 0;"
COMMIT = f"@%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{BARRIER}]; bar.sync 0;"
DONE = COMMIT + WAIT
ALLOC = f"@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [{ADDRESS}], 64;"
CLOSE = "@%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
FREE = "tcgen05.wait::ld.sync.aligned; bar.sync 0; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 64;"


def descriptor(address: int, leading: int = 0, stride: int = 1024, swizzle: int = 2) -> int:
    return address >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | swizzle << 61


def instruction(kind: str, m: int, n: int, slow: tuple[int, int] = (0, 0)) -> int:
    code = CODES[kind][1]
    return (2 if kind == "s8" else 1) << 4 | code << 7 | code << 10 | slow[0] << 15 | slow[1] << 16 | n << 14 | m << 20


def mma(kind: str, m: int, n: int, a: str, b: int, keep: int = 0, slow: tuple[int, int] = (0, 0)) -> str:
    """One thread's product; %r20 is where its columns begin."""
    text = f"setp.ne.u32 %p3, {keep}, 0; mov.b32 %r22, {instruction(kind, m, n, slow)}; mov.b64 %l8, {b};"
    if not a.startswith("["):
        text, a = text + f"mov.b64 %l9, {a};", "%l9"
    return f"{text} @%p2 tcgen05.mma.cta_group::1.kind::{CODES[kind][0]} [%r20], {a}, %l8, %r22, %p3;"


def registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + n}" for n in range(count)) + "}"


def store(first: int, count: int) -> str:
    """A thread's registers to the second array."""
    return "".join(f"st.global.b32 [%l3+{4 * n}], %r{first + n};" for n in range(count))


def kernel(body: str) -> str:
    """The arrays 0 (copied to shared memory) and 1; %p1 the first warp, %p2 one thread, %r21 the warp's own lanes."""
    begin = """mov.u32 %r1, %tid.x; ld.param.u64 %l2, [k_param_0]; ld.param.u64 %l3, [k_param_1];
    mad.wide.u32 %l2, %r1, 256, %l2; mad.wide.u32 %l3, %r1, 256, %l3; shl.b32 %r2, %r1, 8;"""
    for n in range(0, 256, 16):
        begin += f"ld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%l2+{n}];"
        begin += f"st.shared.v4.b32 [%r2+{n}], {{%r3, %r4, %r5, %r6}};"
    begin += f"""setp.lt.u32 %p1, %r1, 32; setp.eq.u32 %p2, %r1, 0; {ALLOC} {CLOSE}
    @%p2 mbarrier.init.shared::cta.b64 [{BARRIER}], 1; bar.sync 0; ld.shared.b32 %r20, [{ADDRESS}];
    shr.u32 %r21, %r1, 5; and.b32 %r21, %r21, 3; shl.b32 %r21, %r21, 21; add.s32 %r21, %r21, %r20;"""
    return entry(begin + body, [".u64", ".u64"], 128)


def run(body: str, data: np.ndarray, given: np.ndarray | type = np.uint32) -> np.ndarray:
    """What 128 threads store, 64 words each, over what was given."""
    held = np.zeros(32768, np.uint8)
    out = given.copy() if isinstance(given, np.ndarray) else np.zeros((128, 64), given)
    held[: len(data)] = data
    run_kernel(kernel(body), (2, 1, 1), [held, out], ADDRESS + 8)
    return out


def result(kind: str) -> type:
    return np.int32 if kind == "s8" else np.float32


def compared(found: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_allclose(found, a.astype(np.float64) @ b.astype(np.float64).T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", CODES)
def test_128_rows_are_the_lanes_and_their_values_the_columns(kind: str) -> None:
    k = KINDS[kind][1]
    a, b = (values(kind, rows, 128 // (32 // k)) for rows in (128, 32))
    steps = "".join(
        mma(kind, 128, 32, str(descriptor(32 * n)), descriptor(16384 + 32 * n), int(n > 0)) for n in range(4)
    )
    body = steps + DONE
    body += f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {registers(40, 32)}, [%r21];" + store(40, 32) + FREE
    found = run(body, np.concatenate([tile_k_fast(a), tile_k_fast(b)]), result(kind))
    compared(found[:, :32], a, b)


@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
@pytest.mark.parametrize("lane", [0, 16])
def test_64_rows_take_half_of_the_lanes_and_a_may_lie_beside_them(kind: str, lane: int) -> None:
    """A goes to tensor memory by 16x32bx2: the first 16 threads of a warp have its first columns, the others the next;
    D comes back the same way, and as mma.sync lays out each 8 columns.
    """
    k, size = KINDS[kind][1], 32 // KINDS[kind][1]
    a, b = values(kind, 64, 2 * k), values(kind, 16, 2 * k)
    row, part = THREADS // 32 * 16 + THREADS % 16, THREADS % 32 // 16
    given = np.zeros((128, 64), np.uint32)
    given[:, :8] = a.view(np.uint32)[row].reshape(128, 2, 8)[THREADS, part]
    tile = np.zeros((16, 128 // size), b.dtype)
    tile[:, : 2 * k] = b
    body = f"add.s32 %r20, %r20, {lane << 16}; add.s32 %r21, %r21, {lane << 16};"
    body += "".join(f"ld.global.b32 %r{40 + n}, [%l3+{4 * n}];" for n in range(8))
    body += f"tcgen05.st.sync.aligned.16x32bx2.x8.b32 [%r21+32], 8, {registers(40, 8)};"
    body += "tcgen05.wait::st.sync.aligned; bar.sync 0;"
    body += "".join(mma(kind, 64, 16, f"[%r20+{32 + 8 * n}]", descriptor(32 * n), n) for n in (0, 1)) + DONE
    body += f"tcgen05.ld.sync.aligned.16x32bx2.x8.b32 {registers(40, 8)}, [%r21], 8;" + store(40, 8)
    body += f"tcgen05.ld.sync.aligned.16x256b.x2.b32 {registers(60, 8)}, [%r21];"
    body += "".join(f"st.global.b32 [%l3+{32 + 4 * n}], %r{60 + n};" for n in range(8))
    body += f"sub.s32 %r20, %r20, {lane << 16};" + FREE
    found = run(body, tile_k_fast(tile), given.view(np.float32))
    halves = np.zeros((64, 16), np.float32)
    for half in (0, 1):
        mine = part == half
        halves[row[mine], 8 * half : 8 * half + 8] = found[mine, :8]
    i = np.arange(8)
    pairs = np.zeros((64, 16), np.float32)
    warp, lanes = THREADS[:, None] // 32, THREADS[:, None] % 32
    pairs[warp * 16 + lanes // 4 + 8 * (i // 2 % 2), i // 4 * 8 + lanes % 4 * 2 + i % 2] = found[:, 8:16]
    compared(halves, a, b)
    compared(pairs, a, b)


def test_operands_whose_k_is_slow() -> None:
    """A [K, M] and B [K, N], by rows of 128 bytes that are swizzled."""
    a, b = values("bf16", 16, 128), values("bf16", 16, 64)
    tiles = np.concatenate([tile_k_slow(a), tile_k_slow(b)])
    where = [descriptor(0, 2048, 1024), descriptor(4096, 2048, 1024)]
    body = mma("bf16", 128, 64, str(where[0]), where[1], slow=(1, 1)) + COMMIT + WAIT
    for n in (0, 32):
        body += f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {registers(40, 32)}, [%r21+{n}];"
        body += "".join(f"st.global.b32 [%l3+{4 * (n + i)}], %r{40 + i};" for i in range(32))
    compared(run(body + FREE, tiles, np.float32), a.T, b.T)


def test_operands_that_are_not_swizzled() -> None:
    """8 rows of 16 bytes lie together. A with K fast: K goes by the leading offset, rows by the stride; B with K slow:
    8 of K lie together, K goes by the leading offset, 8 rows by the stride.
    """
    a, b = values("bf16", 64, 16), values("bf16", 16, 32)
    row, k = np.indices((64, 16))
    tiles = np.zeros(4096, np.uint8).view(a.dtype)
    tiles[(row // 8 * 256 + k // 8 * 128 + row % 8 * 16) // 2 + k % 8] = a
    k, row = np.indices((16, 32))
    tiles[(2048 + row // 8 * 256 + k // 8 * 128 + k % 8 * 16) // 2 + row % 8] = b
    where = [descriptor(at, 128, 256, 0) for at in (0, 2048)]
    body = mma("bf16", 64, 32, str(where[0]), where[1], slow=(0, 1)) + DONE
    body += f"tcgen05.ld.sync.aligned.16x32bx2.x16.b32 {registers(40, 16)}, [%r21], 16;" + store(40, 16) + FREE
    found = run(body, tiles.view(np.uint8), np.float32)[:, :16].reshape(4, 2, 16, 16)  # warp, half, row, column
    compared(found.swapaxes(1, 2).reshape(64, 32), a, b.T)


def product() -> tuple[np.ndarray, str]:
    """Two tiles, and their product of 64 rows and 16 columns."""
    tiles = np.concatenate([tile_k_fast(values("bf16", 64, 64)), tile_k_fast(values("bf16", 16, 64))])
    return tiles, mma("bf16", 64, 16, str(descriptor(0)), descriptor(8192))


LOAD = f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {registers(40, 16)}, [%r21]; tcgen05.wait::ld.sync.aligned;"
PUT = f"tcgen05.st.sync.aligned.32x32b.x16.b32 [%r21], {registers(40, 16)};"
_, MULTIPLY = product()
A_HERE = mma("bf16", 64, 16, "[%r20+16]", descriptor(8192))
TWO = MULTIPLY.replace("@%p2", "")
FAULTS = [
    ("column \\d+ of tensor memory is written by a product whose barrier was not waited", MULTIPLY + COMMIT + LOAD),
    ("column \\d+ .* is written by a product .*; thread 0 .*tcgen05.st", MULTIPLY + COMMIT + PUT),
    ("is read by a product whose barrier", A_HERE + COMMIT + PUT.replace("%r21", "%r21+16")),
    ("written by a product .*tcgen05.dealloc", MULTIPLY + COMMIT + FREE),
    ("has a store that was not waited for .*tcgen05.mma", PUT + "bar.sync 0;" + MULTIPLY),
    ("has a store that was not waited for .*tcgen05.ld", PUT + LOAD),
    ("has a load that was not waited for .*tcgen05.mma", LOAD.partition("; ")[0] + "; bar.sync 0;" + MULTIPLY),
    ("column \\d+ of tensor memory is not allocated", MULTIPLY + DONE + LOAD.replace("%r21", "%r21-8")),
    ("column 512 of tensor memory is not allocated", LOAD.replace("%r21", "%r21+56")),
    ("not allocated.*tcgen05.mma", MULTIPLY.replace("[%r20]", "[%r20-16]")),
    ("not allocated.*tcgen05.ld", FREE + LOAD),
    ("lane 0 of tensor memory is touched by a warp that may touch lanes 32 to 63", LOAD.replace("%r21", "%r20")),
    ("lane 8 of tensor memory is touched", LOAD.replace("[%r21", f"[%r21+{8 << 16}")),
    ("begins at lane 32", MULTIPLY.replace("[%r20]", f"[%r20+{32 << 16}]")),
    ("A and D of a product begin at different lanes", A_HERE.replace("[%r20+16", f"[%r20+{16 | 16 << 16}")),
    ("48 columns of tensor memory are asked for, expected 32, 64", ALLOC.replace("64", "48")),
    ("after tcgen05.relinquish_alloc_permit", ALLOC),
    ("no 32 columns of tensor memory were allocated at", FREE.replace("64", "32")),
    ("no 64 columns of tensor memory were allocated at", FREE + FREE),
    ("ends with 64 columns of tensor memory", ""),
    ("several threads of a block issue", TWO),
    ("another thread's products are not", MULTIPLY + "setp.eq.u32 %p2, %r1, 32;" + COMMIT),
    ("only some threads of a warp take part", FREE.replace("%p1", "%p2")),
    ("the matrix descriptor 0x.* is not emulated", mma("bf16", 64, 16, str(descriptor(0) & ~(1 << 46)), descriptor(0))),
    ("a matrix ends at byte", mma("bf16", 64, 16, str(descriptor(0)), descriptor(32768))),
    ("no product has 32 rows", mma("bf16", 32, 16, str(descriptor(0)), descriptor(8192))),
    ("a barrier that no one completes", MULTIPLY + "bar.sync 0;" + WAIT),
]


@pytest.mark.parametrize(("says", "body"), FAULTS)
def test_what_must_not_be(says: str, body: str) -> None:
    with pytest.raises(KernelFault, match=says):
        run(re.sub(r"\+-", "-", body), product()[0])


def test_allocations_are_apart() -> None:
    body = f"""@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [0], 256;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [4], 128; bar.sync 0;
    ld.shared.b32 %r30, [0]; ld.shared.b32 %r31, [4]; st.global.b32 [%l3], %r20; st.global.b32 [%l3+4], %r30;
    st.global.b32 [%l3+8], %r31; bar.sync 0; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 256;
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r31, 128; {FREE}"""
    held, out = np.zeros(32768, np.uint8), np.zeros((128, 64), np.uint32)
    text = kernel(body).replace(CLOSE, "")
    run_kernel(text, (1, 1, 1), [held, out], ADDRESS + 8)
    spans = sorted(zip(out[0, :3].tolist(), (64, 256, 128), strict=True))
    assert all(a + n <= b for (a, n), (b, _) in zip(spans, [*spans[1:], (512, 0)], strict=True))
    assert all(at % n == 0 for at, n in spans)
    with pytest.raises(KernelFault, match="256 columns of tensor memory are asked for, and so many are not free"):
        run_kernel(text.replace("[4], 128", "[4], 256"), (1, 1, 1), [held, out], ADDRESS + 8)


def test_operands_that_change_too_early_show() -> None:
    tiles, multiply = product()
    load = f"tcgen05.ld.sync.aligned.16x32bx2.x8.b32 {registers(40, 8)}, [%r21], 8;" + store(40, 8) + FREE
    over = "mov.b32 %r30, 0; st.shared.b32 [%r2], %r30; bar.sync 0;"
    right, late, early = (
        run(body + load, tiles) for body in (multiply + DONE, multiply + DONE + over, multiply + COMMIT + over + WAIT)
    )
    assert (late == right).all()
    assert (early != right).any()


@pytest.mark.parametrize(
    "text",
    [
        "tcgen05.cp.cta_group::1.128x256b [%r20], %l8;",
        "@%p2 tcgen05.mma.cta_group::2.kind::f16 [%r20], %l9, %l8, %r22, %p3;",
        "@%p2 tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block32 [%r20], %l9, %l8, %r22, [%r21], [%r21], %p3;",
        "tcgen05.ld.sync.aligned.16x64b.x1.b32 %r40, [%r21];",
    ],
)
def test_forms_that_are_not_emulated(text: str) -> None:
    with pytest.raises(PlancError, match=r"the PTX instruction '.*tcgen05\..*' is not emulated"):
        run(text, np.zeros(16, np.uint8))


def test_blocks_that_part_keep_their_products() -> None:
    """One of two blocks takes another way between a product and its wait."""
    a, b = values("bf16", 64, 64), values("bf16", 16, 64)
    part = "mov.u32 %r31, %ctaid.x; setp.eq.u32 %p6, %r31, 1; @%p6 bra ON; add.s32 %r30, %r30, 1; ON:"
    body = mma("bf16", 64, 16, str(descriptor(0)), descriptor(8192)) + COMMIT + part + WAIT
    body += f"tcgen05.ld.sync.aligned.16x32bx2.x8.b32 {registers(40, 8)}, [%r21], 8;" + store(40, 8) + FREE
    found = run(body, np.concatenate([tile_k_fast(a), tile_k_fast(b)]), np.float32)[:, :8].reshape(4, 2, 16, 8)
    compared(found.transpose(0, 2, 1, 3).reshape(64, 16), a[:, :16], b[:, :16])
    with pytest.raises(KernelFault, match=r"ends with 64 columns"):
        run(body.replace(FREE, f"@%p6 bra OUT; {FREE} OUT:"), np.concatenate([tile_k_fast(a), tile_k_fast(b)]))
