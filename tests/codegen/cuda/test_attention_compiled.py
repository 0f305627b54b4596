"""Attention as it ships: its PTX in the emulator, close to the reference, the same bits whatever shares a step."""

from pathlib import Path

import numpy as np
import pytest

from planc.codegen.cuda import attention as rows
from planc.codegen.cuda.call import Bucket
from planc.compiler.ir.ops import OPS
from tests.codegen.cuda.paged import Runner, attend, emulated
from tests.codegen.cuda.test_attention import (
    APPENDS,
    APPENDS_F8,
    BOUNDS,
    CASES,
    ROWS,
    TURNS,
    check_append,
    check_turning_append,
)
from tests.kernels.harness import assert_close, assert_same_bits
from tests.kernels.paged import Shape
from tests.kernels.test_attention import World

QUICK = {(90, "gqa 3, bf16")}
SLOW = [(arch, name) for arch in (80, 89, 90, 100, 120) for name in ("gqa 3, bf16", "all at once", "all at once, i8")]
SLOW += [(arch, "gqa 4, f8") for arch in (89, 90, 100, 120)]
SLOW += [(90, "block 8"), (80, "block 24"), (90, "block 128"), (100, "block 128")]
SLOW += [(90, "head 256, sliding, bf16"), (90, "sinks, bf16"), (120, "softcap, bf16"), (80, "alibi")]
SLOW += [(100, "head 256, sliding, bf16"), (100, "sinks, bf16")]


@pytest.fixture(autouse=True)
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 128 positions, so that short sequences have several."""
    monkeypatch.setattr(rows, "_SPLIT", 128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


class Steps:
    """Steps of three sequences on an emulated GPU, each with its keys in one program and split."""

    def __init__(self, name: str, arch: int, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.case, self.world = CASES[name], World(ROWS[name][0], [150, 40, 130])
        self.arch, self.run, self.monkeypatch = arch, run, monkeypatch

    def given(self, *parts: tuple[int, int, int]) -> list[np.ndarray]:
        return self.world.step(parts) + self.world.per_head(self.case)

    def step(self, *parts: tuple[int, int, int], bucket: Bucket) -> np.ndarray:
        given = self.given(*parts)
        self.monkeypatch.setattr(rows, "_FILLED", 0)
        whole = attend(self.case, given, bucket, self.arch, self.run)
        self.monkeypatch.setattr(rows, "_FILLED", 1 << 30)
        assert_same_bits(attend(self.case, given, bucket, self.arch, self.run), whole, f"{parts}, split")
        return whole[: len(given[0])]


def parameters() -> list[object]:
    return [pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow) for row in SLOW]


@pytest.mark.parametrize(("arch", "name"), parameters())
def test_close_and_no_bit_depends_on_the_step(
    arch: int, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(name, arch, emulated(folder / str(arch), arch), monkeypatch)
    parts = [(1, 35, 40), (0, 110, 150), (2, 129, 130)]
    batched = steps.step(*parts, bucket=Bucket(48, 4, 4))
    (want,) = OPS["paged_attention"].ref(dict(steps.case.attrs), steps.given(*parts), steps.case.types)
    assert_close(batched, want, BOUNDS[ROWS[name][0].dtype], name)
    whole = batched[5:45]
    assert_same_bits(steps.step((0, 110, 127), bucket=Bucket(17, 1, 1)), whole[:17], "first chunk")
    assert_same_bits(steps.step((0, 127, 150), bucket=Bucket(25, 25, 25)), whole[17:], "second chunk")
    for at in (110, 128, 149):
        assert_same_bits(steps.step((0, at, at + 1), bucket=Bucket(1, 1, 1)), whole[at - 110 : at - 109], "decode")


def appends() -> list[object]:
    rows = [(arch, shape) for arch in (80, 89, 90, 100, 120) for shape in APPENDS]
    rows += [(arch, APPENDS_F8) for arch in (89, 90, 100, 120)]
    quick = (90, APPENDS[-1])
    return [pytest.param(*row, marks=() if row == quick else pytest.mark.slow) for row in rows]


@pytest.mark.parametrize(("arch", "shape"), appends())
def test_append(arch: int, shape: Shape, folder: Path) -> None:
    check_append(shape, emulated(folder / str(arch), arch), arch)


def turns() -> list[object]:
    rows = [(arch, turn) for arch in (80, 90, 100, 120) for turn in TURNS]
    return [pytest.param(*row, marks=() if row == (90, TURNS[-1]) else pytest.mark.slow) for row in rows]


@pytest.mark.parametrize(("arch", "turn"), turns())
def test_keys_turn_on_their_way_to_the_cache(arch: int, turn: tuple[Shape, int, bool], folder: Path) -> None:
    check_turning_append(*turn, emulated(folder / str(arch), arch), arch)
