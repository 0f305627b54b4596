"""What ranks do together: the PTX of `ranks.cu` on emulated GPUs, in random orders, has the reference's bits."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from planc.codegen.cuda import aot
from planc.codegen.cuda.call import Bucket, TritonKernel
from planc.codegen.cuda.collective import calls
from planc.compiler.emulate_ranks import reference
from planc.compiler.ir.graph import Node, Value
from planc.compiler.ir.types import TensorType
from planc.emulator.device import Device
from planc.emulator.machine import KernelFault
from planc.emulator.ranks import Together
from planc.errors import PlancError
from planc.plans import ranks
from planc.plans.launches import Binary

ONE, TWO, GATHER = "all_reduce_one_shot", "all_reduce_two_shot", "all_gather"


def kernel_of(entry: str, count: int) -> TritonKernel:
    """The kernel that a plan of so many ranks has."""
    op, tokens = ("all_gather", 1) if entry == GATHER else ("all_reduce", 1 if entry == ONE else 4096)
    attrs = {"ranks": count, "starts": tuple(range(0, 64 * count, 64)), "size": 64 * count}
    node = Node(
        op, ("x",), (Value("y", TensorType("f32", ("T", 64 * (count if op == GATHER else 1)))),), tuple(attrs.items())
    )
    made = calls(node, {"x": TensorType("f32", ("T", 64))}, Bucket(tokens, 1, 1))[0].kernel
    assert made.function == entry
    return made


def compiled(
    entry: str, count: int, folder: Path, sm: int = 90, sources: Path = aot.KERNELS
) -> tuple[Binary, bytes, str]:
    (binary,) = aot.compile([kernel_of(entry, count)], sm, folder, sources=sources)
    return binary, (folder / f"{binary.name}.cubin").read_bytes(), (folder / f"{binary.name}.ptx").read_text()


def check(
    made: tuple[Binary, bytes, str], count: int, sizes: list[int], seed: int, to: int | None = None, sm: int = 90
) -> None:
    """Messages of these sizes, one after the other; `to` is the byte of the result, of all, 0 in place of the parts."""
    binary, image, text = made
    op = GATHER if binary.entry == GATHER else "all_reduce"
    rng = np.random.default_rng(seed)
    most = 4 * max(sizes) * (count if op == GATHER else 1)
    at = -(-4 * max(sizes) // 256) * 256 if to is None else to
    gpus = Together(Device("any", sm, 1 << 30, 1 << 16), count, at + most, seed)
    scales = [10.0 ** rng.integers(-3, 4, n) for n in sizes]
    messages = [[(rng.standard_normal(s.size) * s).astype(np.float32) for _ in range(count)] for s in scales]
    for parts, found in zip(messages, gpus.run(image, text, binary, messages, at), strict=True):
        wanted = reference(op, parts)
        for rank, got in enumerate(found):
            np.testing.assert_array_equal(got.view(np.int32), wanted.view(np.int32), f"rank {rank} of {parts[0].size}")


@pytest.mark.parametrize(
    ("entry", "count", "sizes"),
    [
        (ONE, 2, [1, 4, 5, 2048, 2052, 8191, 131072]),
        (ONE, 3, [64, 64, 64, 64, 6000, 64]),
        (TWO, 3, [1, 4, 7, 4099, 140_000]),
        (GATHER, 3, [1, 4, 5, 2050, 9000]),
        pytest.param(ONE, 8, [12, 65536], marks=pytest.mark.slow),
        pytest.param(TWO, 8, [3, 140_001], marks=pytest.mark.slow),
        pytest.param(GATHER, 8, [3, 20_000], marks=pytest.mark.slow),
        pytest.param(ONE, 16, [500], marks=pytest.mark.slow),
    ],
)
def test_all_ranks_have_the_references_bits(entry: str, count: int, sizes: list[int], tmp_path: Path) -> None:
    made = compiled(entry, count, tmp_path)
    for seed in (1, 2):
        check(made, count, sizes, seed)


@pytest.mark.parametrize("entry", [ONE, TWO])
def test_a_sum_in_place_of_its_part(entry: str, tmp_path: Path) -> None:
    check(compiled(entry, 3, tmp_path), 3, [40, 9000, 77], seed=5, to=0)


def test_parts_that_lie_at_no_multiple_of_16_bytes(tmp_path: Path) -> None:
    for entry in (ONE, TWO, GATHER):
        check(compiled(entry, 2, tmp_path), 2, [44, 44], seed=5, to=4 * 44 + 4)


def test_the_bits_of_an_element_do_not_depend_on_the_message(tmp_path: Path) -> None:
    """The same elements in one shot and in two, at the beginning of a message and behind others."""
    rng = np.random.default_rng(3)
    parts = [rng.standard_normal(96).astype(np.float32) for _ in range(4)]
    found = []
    for entry, before, behind in ((ONE, 0, 0), (ONE, 41, 5000), (TWO, 0, 0), (TWO, 3001, 6)):
        binary, image, text = compiled(entry, 4, tmp_path)
        wide = [np.concatenate([np.ones(before), p, np.ones(behind)]).astype(np.float32) for p in parts]
        n = wide[0].size
        ((got, *_),) = Together(Device("any", 90, 1 << 30, 1 << 16), 4, 8 * n + 16).run(
            image, text, binary, [wide], -(-4 * n // 16) * 16
        )
        found.append(got[before : before + 96])
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize("sm", [80, 120, *(pytest.param(n, marks=pytest.mark.slow) for n in (86, 89, 100, 121))])
def test_every_sm_has_them(sm: int, tmp_path: Path) -> None:
    kernels = [kernel_of(entry, 4) for entry in (ONE, TWO, GATHER)]
    for binary in aot.compile(kernels, sm, tmp_path):
        assert (binary.threads, binary.shared, binary.hidden) == (ranks.THREADS, 0, 0)
        text = (tmp_path / f"{binary.name}.ptx").read_text()
        assert f".target sm_{sm}{'a' if sm >= 90 else ''}" in text
        assert "st.release.sys" in text
        assert "ld.acquire.sys" in text
        check((binary, (tmp_path / f"{binary.name}.cubin").read_bytes(), text), 4, [100, 100], 1, sm=sm)


def test_the_bytes_do_not_depend_on_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = compiled(ONE, 2, tmp_path / "here")
    (tmp_path / "a longer path").mkdir()
    shutil.copy(aot.KERNELS / "ranks.cu", tmp_path / "a longer path")
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path / "other cache"))
    assert compiled(ONE, 2, tmp_path / "there", sources=tmp_path / "a longer path") == here


def test_too_many_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlancError, match=r"at most 16 ranks, got 17; .*--tp"):
        kernel_of(ONE, 17)


# --- a kernel that is wrong must be caught


def changed(folder: Path, old: str, new: str) -> Path:
    """A folder of sources with a wrong `ranks.cu`."""
    text = (aot.KERNELS / "ranks.cu").read_text()
    assert text.count(old) == 1, old
    folder.mkdir()
    (folder / "ranks.cu").write_text(text.replace(old, new))
    return folder


WRONG = {
    "a wait that is left out": ("if ((int)(seen - epoch) >= 0) break;", "break;"),
    "an epoch that does not advance": ("if (threadIdx.x == 0) *this->epoch() = epoch;", ""),
    "another order of the sum": ("x[r] = parts[r][i];", "x[r] = parts[RANKS - 1 - r][i];"),
    "one half of the staging for all epochs": ("* 2 + (epoch & 1)", "* 2"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_kernel_is_caught(what: str, tmp_path: Path) -> None:
    made = compiled(ONE, 3, tmp_path / "out", sources=changed(tmp_path / "sources", *WRONG[what]))
    with pytest.raises(AssertionError, match="rank"):
        for seed in range(8):
            check(made, 3, [100] * 6, seed)


@pytest.mark.parametrize("entry", [TWO, GATHER])
@pytest.mark.parametrize("meeting", ["group.meet(epoch - 1);", "group.meet(epoch);"])
def test_a_meeting_that_is_left_out_is_caught(entry: str, meeting: str, tmp_path: Path) -> None:
    text = (aot.KERNELS / "ranks.cu").read_text()
    start = text.index(f"void {entry}(")
    body = text[start : text.index("\n}\n", start)]
    sources = changed(tmp_path / "sources", body, body.replace(meeting, ""))
    made = compiled(entry, 3, tmp_path / "out", sources=sources)
    with pytest.raises((AssertionError, KernelFault)):
        for seed in range(8):
            check(made, 3, [100] * 6, seed)


def test_a_rank_that_is_never_told_is_an_error(tmp_path: Path) -> None:
    sources = changed(tmp_path / "sources", '"st.release.sys.global.u32 [%0], %1;"', '"// %0 %1"')
    with pytest.raises(KernelFault, match="all_reduce_one_shot waits for ever: no GPU writes it"):
        check(compiled(ONE, 2, tmp_path / "out", sources=sources), 2, [8], 1)
