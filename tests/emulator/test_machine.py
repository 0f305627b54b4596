"""Control flow, memory and what lanes do together, on kernels written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from planc.emulator.machine import KernelFault
from planc.emulator.run import run_kernel
from planc.errors import PlancError
from tests.emulator.snippet import compute, entry

LANES = np.arange(64, dtype=np.uint32)
ADDRESS = "ld.param.u64 %l1, [k_param_0]; mov.u32 %r1, %tid.x; mad.wide.u32 %l2, %r1, 4, %l1;"


def run(body: str, *arrays: np.ndarray, grid: int = 1, threads: int = 32, shared: int = 0) -> None:
    run_kernel(entry(body, [".u64"] * len(arrays), threads), (grid, 1, 1), arrays, shared)


def test_lanes_of_a_warp_part_and_meet_again() -> None:
    text = """
    and.b32 %r1, <0>, 1; setp.eq.u32 %p1, %r1, 0; mov.b32 <d>, 5; @%p1 bra EVEN;
    add.s32 <d>, <0>, 100; bra MEET;
    EVEN: mul.lo.s32 <d>, <0>, 2;
    MEET: add.s32 <d>, <d>, 1;"""
    assert compute(text, [LANES], np.uint32).tolist() == [n * 2 + 1 if n % 2 == 0 else n + 101 for n in range(64)]


def test_lanes_leave_a_loop_one_by_one() -> None:
    text = """
    mov.b32 <d>, 0; mov.b32 %r1, 0;
    LOOP: setp.ge.u32 %p1, %r1, <0>; @%p1 bra DONE; add.s32 <d>, <d>, %r1; add.s32 %r1, %r1, 1; bra LOOP;
    DONE: add.s32 <d>, <d>, 1000;"""
    assert compute(text, [LANES], np.uint32).tolist() == [n * (n - 1) // 2 + 1000 for n in range(64)]


def test_lanes_that_return_early_write_nothing() -> None:
    out = np.full(32, 7, np.uint32)
    run(f"{ADDRESS} setp.gt.u32 %p1, %r1, 20; @%p1 ret; st.global.b32 [%l2], %r1;", out)
    assert out.tolist() == [n if n <= 20 else 7 for n in range(32)]


def test_blocks_part_and_each_has_its_own_shared_memory() -> None:
    out = np.zeros(4 * 32, np.uint32)
    body = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.s32 %r3, %r2, 32, %r1;
    ld.param.u64 %l1, [k_param_0]; mad.wide.u32 %l2, %r3, 4, %l1;
    mov.b32 %r4, dynamic; shl.b32 %r5, %r1, 2; add.s32 %r5, %r5, %r4; st.shared.b32 [%r5], %r3;
    bar.sync 0;
    setp.lt.u32 %p1, %r2, 2; @%p1 bra LOW;
    xor.b32 %r6, %r5, 4; ld.shared.b32 %r7, [%r6]; st.global.b32 [%l2], %r7; bra END;
    LOW: ld.shared.b32 %r7, [%r5]; add.s32 %r7, %r7, 1000; st.global.b32 [%l2], %r7;
    END:"""
    run(body, out, grid=4, shared=128)
    expected = [n + 1000 if n < 64 else n ^ 1 for n in range(128)]
    assert out.tolist() == expected


def test_more_blocks_than_run_in_step() -> None:
    out = np.zeros(1200 * 32, np.uint32)
    body = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.s32 %r3, %r2, 32, %r1;
    ld.param.u64 %l1, [k_param_0]; mad.wide.u32 %l2, %r3, 4, %l1; st.global.b32 [%l2], %r3;"""
    run(body, out, grid=1200)
    assert (out == np.arange(1200 * 32)).all()


def test_labels_and_registers_of_inline_assembly_are_its_own() -> None:
    inline = "{ .reg .pred done; .reg .b32 n; mov.b32 n, 0; again: add.s32 n, n, 1; add.s32 <d>, <d>, 1;"
    inline += " setp.ge.u32 done, n, <0>; @!done bra again; }"
    got = compute(f"mov.b32 <d>, 0; {inline} {inline}", [LANES + 1], np.uint32)
    assert got.tolist() == [2 * (n + 1) for n in range(64)]


def test_vectors_of_memory() -> None:
    source, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    body = """
    mov.u32 %r1, %tid.x; ld.param.u64 %l1, [k_param_0]; ld.param.u64 %l2, [k_param_1];
    mad.wide.u32 %l1, %r1, 16, %l1; mad.wide.u32 %l2, %r1, 16, %l2;
    ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%l1];
    shl.b32 %r6, %r1, 4; st.shared.v2.b32 [%r6], {%r5, %r4}; st.shared.v4.b16 [%r6+8], {%h1, %h1, %h1, %h1};
    st.shared.v2.b32 [%r6+8], {%r3, %r2};
    ld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%r6]; st.global.v4.b32 [%l2], {%r2, %r3, %r4, %r5};"""
    run(body, source, out, shared=512)
    assert out.reshape(-1, 4).tolist() == source.reshape(-1, 4)[:, ::-1].tolist()


def test_narrow_loads_are_extended() -> None:
    source, out = np.arange(-16, 16, dtype=np.int8), np.zeros(32, np.int32)
    body = """
    mov.u32 %r1, %tid.x; ld.param.u64 %l1, [k_param_0]; ld.param.u64 %l2, [k_param_1];
    cvt.u64.u32 %l3, %r1; add.s64 %l1, %l1, %l3; mad.wide.u32 %l2, %r1, 4, %l2;
    ld.global.s8 %r2, [%l1]; ld.global.b8 %h1, [%l1]; cvt.u32.u16 %r3, %h1; mad.lo.s32 %r4, %r3, 1000, %r2;
    st.global.b32 [%l2], %r4;"""
    run(body, source, out)
    assert out.tolist() == [(n & 255) * 1000 + n for n in range(-16, 16)]


def test_atomics_count_every_lane() -> None:
    out = np.array([5, 0, 0], np.uint32)
    body = """
    ld.param.u64 %l1, [k_param_0]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;
    atom.global.add.u32 %r3, [%l1], 1; red.global.max.u32 [%l1+4], %r1;
    setp.eq.u32 %p1, %r1, 3; @%p1 atom.global.add.u32 %r4, [%l1+8], %r2;"""
    run(body, out, grid=5)
    assert out.tolist() == [5 + 5 * 32, 31, 10]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("shfl.sync.bfly.b32 <d>, <0>, 5, 31, -1;", lambda n: n ^ 5),
        ("shfl.sync.up.b32 <d>, <0>, 3, 0, -1;", lambda n: n - 3 if n >= 3 else n),
        ("shfl.sync.down.b32 <d>, <0>, 4, 31, -1;", lambda n: n + 4 if n < 28 else n),
        ("shfl.sync.idx.b32 <d>, <0>, 9, 31, -1;", lambda n: 9),
        ("shfl.sync.idx.b32 <d>, <0>, 2, 6175, -1;", lambda n: n // 8 * 8 + 2),  # segments of 8: 0x181f
        ("sub.s32 %r1, 31, <0>; shfl.sync.idx.b32 <d>, <0>, %r1, 31, -1;", lambda n: 31 - n),
        ("shfl.sync.up.b32 %r1|%p1, <0>, 2, 0, -1; selp.b32 <d>, 1, 0, %p1;", lambda n: int(n >= 2)),
        ("redux.sync.add.s32 <d>, <0>, -1;", lambda n: 496),
        ("redux.sync.max.u32 <d>, <0>, -1;", lambda n: 31),
        (
            "mov.b32 %r1, 0f7FC00000; setp.eq.u32 %p1, <0>, 5; selp.b32 %r1, <0>, %r1, %p1; "
            "redux.sync.max.f32 <d>, %r1, -1;",
            lambda n: 5,
        ),
        ("xor.b32 %r1, <0>, 0x80000000; redux.sync.max.abs.f32 <d>, %r1, -1;", lambda n: 31),
        ("setp.gt.u32 %p1, <0>, 29; vote.sync.ballot.b32 <d>, %p1, -1;", lambda n: 3 << 30),
        ("setp.gt.u32 %p1, <0>, 29; vote.sync.any.pred %p2, %p1, -1; selp.b32 <d>, 1, 0, %p2;", lambda n: 1),
        ("setp.gt.u32 %p1, <0>, 29; vote.sync.all.pred %p2, %p1, -1; selp.b32 <d>, 1, 0, %p2;", lambda n: 0),
        ("elect.sync %r1|%p1, -1; selp.b32 <d>, 1, 0, %p1;", lambda n: int(n == 0)),
        ("setp.lt.u32 %p1, <0>, 8; @!%p1 bra OUT; activemask.b32 <d>; OUT:", lambda n: 255 if n < 8 else 0),
    ],
    ids=lambda v: v.split(";")[0] if isinstance(v, str) else "",
)
def test_lanes_of_a_warp(text: str, says) -> None:
    warps = np.tile(np.arange(32, dtype=np.uint32), 2)
    assert compute(text, [warps], np.uint32).tolist() == [says(n) & 0xFFFFFFFF for n in range(32)] * 2


def test_lanes_that_part_meet_at_the_barrier_of_a_loop() -> None:
    """The loop's head lies behind its end, as compilers lay it out, and what some lanes do alone behind both."""
    out = np.zeros(64, np.uint32)
    body = """
    mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; mov.b32 %r2, 0; mov.b32 %r3, 0; bra HEAD;
    TAIL: add.s32 %r2, %r2, 1; setp.eq.u32 %p2, %r2, 3; @%p2 bra OUT;
    HEAD: bar.sync 0; @!%p1 bra TAIL; add.s32 %r3, %r3, 10; bra TAIL;
    OUT: bar.sync 0; add.s32 %r2, %r2, %r3; ld.param.u64 %l1, [k_param_0]; mad.wide.u32 %l1, %r1, 4, %l1;
    st.global.b32 [%l1], %r2;"""
    run_kernel(entry(body, [".u64"], 64), (1, 1, 1), [out], 0)
    assert out.tolist() == [33] * 32 + [3] * 32


FAULTS = [
    ("a store of 4 bytes at .* outside of its memory: byte 128 of", "add.s64 %l2, %l2, 4; st.global.b32 [%l2], %r1;"),
    ("a load of 4 bytes at .* outside of its memory", "ld.global.b32 %r2, [%l2+124]; st.global.b32 [%l2], %r2;"),
    ("a store of 4 bytes at .* outside", "st.global.b32 [%l2-4], %r1;"),
    ("is not aligned; thread 0 .*st.global.b32", "st.global.b32 [%l2+2], %r1;"),
    ("4 bytes at byte 128 of shared memory, which has 128", "shl.b32 %r3, %r1, 2; st.shared.b32 [%r3+4], %r1;"),
    ("no multiple of 4", "st.shared.b32 [%r1], %r1;"),
    ("only 8 of 32 threads reach a barrier", "setp.lt.u32 %p1, %r1, 8; @!%p1 bra OUT; bar.sync 0; OUT:"),
    ("a load of 16 bytes .* not aligned", "ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%l2];"),
    (
        "a barrier that no one completes",
        "mbarrier.init.shared.b64 [%r0], 1; mbarrier.try_wait.parity.shared.b64 %p1, [%r0], 0;",
    ),
]


@pytest.mark.parametrize(("message", "body"), FAULTS, ids=[m for m, _ in FAULTS])
def test_a_wrong_access_names_kernel_thread_and_instruction(message: str, body: str) -> None:
    with pytest.raises(KernelFault, match=message) as caught:
        run(f"{ADDRESS} {body}", np.zeros(32, np.uint32), shared=128)
    assert str(caught.value).startswith("kernel k: ")
    assert "of block (0, 0, 0), at '" in str(caught.value)


def test_the_thread_of_a_fault_is_the_first_that_is_wrong() -> None:
    with pytest.raises(KernelFault, match=r"thread 30 of block \(2, 0, 0\)"):
        run(
            f"{ADDRESS} mov.u32 %r2, %ctaid.x; setp.eq.u32 %p1, %r2, 2; add.s64 %l3, %l2, 8;"
            "selp.b64 %l2, %l3, %l2, %p1; st.global.b32 [%l2], %r1;",
            np.zeros(32, np.uint32),
            grid=4,
        )


def test_asynchronous_copies_come_when_they_are_waited_for() -> None:
    source = np.arange(32, dtype=np.uint32)
    copy = f"""{ADDRESS} ld.param.u64 %l3, [k_param_1]; mad.wide.u32 %l4, %r1, 4, %l3; shl.b32 %r3, %r1, 2;
    cp.async.ca.shared.global [%r3], [%l2], 4; cp.async.commit_group;"""
    after = "ld.shared.b32 %r4, [%r3]; st.global.b32 [%l4], %r4;"
    out = np.zeros(32, np.uint32)
    run(f"{copy} cp.async.wait_group 0; {after}", source, out, shared=128)
    assert out.tolist() == source.tolist()
    run(f"{copy} cp.async.wait_group 1; {after}", source, out, shared=128)
    assert not (out == source).any()  # the group was allowed to be on its way


def test_asynchronous_copies_fill_with_zeros_and_read_nothing() -> None:
    out = np.ones(32, np.uint32)
    body = f"""{ADDRESS} shl.b32 %r3, %r1, 2; mov.b32 %r5, 0;
    cp.async.ca.shared.global [%r3], [%l2+4096], 4, %r5; cp.async.wait_all;
    ld.shared.b32 %r4, [%r3]; st.global.b32 [%l2], %r4;"""
    run(body, out, shared=128)
    assert not out.any()


def test_a_barrier_counts_arrivals_and_phases() -> None:
    out = np.zeros(32, np.uint32)
    arrive = "mbarrier.arrive.shared.b64 _, [%r0];"
    wait = "mbarrier.try_wait.parity.shared.b64 %p1, [%r0], {}; "
    body = f"""{ADDRESS} mov.b32 %r0, 64; setp.eq.u32 %p2, %r1, 0; @%p2 mbarrier.init.shared.b64 [%r0], 32; bar.sync 0;
    {arrive} {wait.format(0)} {arrive} {wait.format(1)} selp.b32 %r2, 1, 0, %p1; st.global.b32 [%l2], %r2;"""
    run(body, out, shared=128)
    assert out.all()
    with pytest.raises(KernelFault, match="no one completes"):
        run(body.replace("], 32; bar", "], 33; bar"), out, shared=128)
    with pytest.raises(KernelFault, match="threads more than 31"):
        run(body.replace("], 32; bar", "], 31; bar"), out, shared=128)


def test_wrong_launches_are_refused() -> None:
    text = entry("ret;", [".u64"], 64)
    with pytest.raises(KernelFault, match="runs with 32 threads a block, expected 64"):
        run_kernel(text, (1, 1, 1), [np.zeros(4)], 0, threads=32)
    with pytest.raises(ValueError, match="argument 0 has 4 bytes, the kernel takes 8"):
        run_kernel(text, (1, 1, 1), [1.0], 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".func f() { ret; }", "device functions"),
        (entry(".local .b8 depot[8];", [".u64"]), "directive .* is not emulated"),
        (entry("bra NOWHERE;", [".u64"]), "label NOWHERE is not there"),
        (entry("@%q1 ret;", [".u64"]), "guard %q1 is not declared"),
        (entry("ret;", [".u64"])[:-4], "ends within a kernel"),
    ],
    ids=["func", "local", "label", "guard", "cut"],
)
def test_ptx_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(PlancError, match=message):
        run_kernel(text, (1, 1, 1), [np.zeros(4)], 0)
