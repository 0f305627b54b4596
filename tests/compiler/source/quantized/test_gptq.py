"""GPTQ's layout in 4 and 8 bits, both formats of zero points, with and without act-order."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planc.compiler.source import open_source
from planc.errors import PlancError
from tests.compiler.source.quantized.checkpoints import Weight, gptq, random_weight, replace, restate, write
from tests.compiler.source.quantized.checks import check_missing, check_refused, check_source
from tests.models import tiny

CONFIG: dict[str, Any] = dict(
    quant_method="gptq",
    bits=4,
    group_size=32,
    desc_act=False,
    sym=True,
    checkpoint_format="gptq",
    damp_percent=0.01,
    true_sequential=True,
    lm_head=False,
    dynamic=None,
    meta={"quantizer": ["gptqmodel:7.7.0"]},
)


def made(folder: Path, *, draw: dict[str, Any] | None = None, v2: bool = False, **changes: Any) -> dict[str, Weight]:
    """Writes a checkpoint over a tiny model; `draw` goes to random_weight."""
    config = CONFIG | dict(checkpoint_format="gptq_v2" if v2 else "gptq") | changes
    bits, rng, more = config["bits"], np.random.default_rng(0), draw or {}

    def drawn(n: int, k: int) -> Weight:
        group = k if config["group_size"] == -1 else config["group_size"]
        return random_weight(n, k, bits, group, rng, **more)

    return write(folder, config, drawn, partial(gptq, bits=bits, v2=v2))


CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "4 bits": (dict(draw=dict(zero=8)), "int4-wo-g32"),
    "4 bits, v2": (dict(draw=dict(zero=8), v2=True), "int4-wo-g32"),
    "4 bits, a scale a channel": (dict(draw=dict(zero=8), group_size=-1), "int4-wo-g{}"),
    "4 bits, asymmetric": (dict(sym=False), "awq-g32"),
    "4 bits, asymmetric, v2": (dict(sym=False, v2=True), "awq-g32"),
    "4 bits, act-order": (dict(draw=dict(zero=8, shuffled=True), desc_act=True), None),
    "4 bits, asymmetric, act-order": (dict(draw=dict(shuffled=True), sym=False, desc_act=True), None),
    "4 bits, groups of 16": (dict(draw=dict(zero=8), group_size=16), None),
    "8 bits, a scale a channel": (dict(draw=dict(zero=128), bits=8, group_size=-1), "int8-wo"),
    "8 bits in groups": (dict(draw=dict(zero=128), bits=8), None),
    "8 bits, asymmetric": (dict(bits=8, group_size=-1, sym=False), None),
    "8 bits, act-order": (dict(draw=dict(zero=128, shuffled=True), bits=8, desc_act=True), None),
}


@pytest.mark.parametrize("case", CASES)
def test_what_was_packed_reads_back(case: str, tmp_path: Path) -> None:
    options, scheme = CASES[case]
    folder = tiny("llama", tmp_path, tokenizer=False)
    packed = made(folder, **options)
    with open_source(str(folder)) as source:
        check_source(source, {name: weight.floats for name, weight in packed.items()}, scheme)
        for name, weight in packed.items():
            if scheme is not None:
                shift = 128 if scheme == "int8-wo" else 0
                np.testing.assert_array_equal(source.read(f"{name}:q").astype(int) + shift, weight.codes)
        expected = ["act-order" if "act-order" in case else "in groups that no kernel takes"] if scheme is None else []
        assert len(source.notes) == len(expected)
        assert all(words in note for words, note in zip(expected, source.notes, strict=True))


def test_zero_points_of_0_borrow_from_their_neighbours(tmp_path: Path) -> None:
    """The format `gptq` subtracts 1 from every field of a word at once, and a borrow goes on to the next field."""
    folder = tiny("llama", tmp_path, tokenizer=False)
    packed = made(folder, sym=False, v2=True)
    zeros = np.random.default_rng(2).integers(0, 16, (2, 96))
    zeros[:, ::3] = 0
    name = "model.layers.0.mlp.up_proj"
    plain = gptq(
        Weight(packed[f"{name}.weight"].codes, packed[f"{name}.weight"].scales, zeros, np.arange(64) // 32), 4, v2=True
    )
    less = (plain["qzeros"].view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    replace(folder, lambda tensors: tensors | {f"{name}.qzeros": less})
    restate(folder, CONFIG | dict(sym=False))
    with open_source(str(folder)) as source:
        np.testing.assert_array_equal(source.read(f"{name}.weight:z"), zeros)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny("llama", tmp_path_factory.mktemp("gptq"), tokenizer=False)
    made(folder, draw=dict(zero=8))
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "model"))


def test_rules_that_only_leave_modules_out_are_read(folder: Path) -> None:
    restate(folder, CONFIG | dict(dynamic={"-:.*lm_head.*": {}}))
    with open_source(str(folder)) as source:
        assert len(source.native) == 14


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": (dict(novelty=3), "novelty = 3"),
    "bits": (dict(bits=3), "bits = 3; planc reads 4 or 8"),
    "no bits": (dict(bits=None), "needs bits"),
    "dynamic": (dict(dynamic={"+:.*up_proj": {"bits": 8}}), "a dynamic rule for '+:.*up_proj'"),
    "format": (dict(checkpoint_format="marlin"), "checkpoint_format = 'marlin'"),
    "rotation": (dict(rotation="hadamard"), "rotation = 'hadamard'; planc reads no value of it"),
    "group size that does not divide K": (dict(group_size=40), "groups of 40 do not divide"),
    "group size of other scales": (dict(group_size=16), "qzeros has shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_by_name(case: str, folder: Path) -> None:
    changes, words = REFUSED[case]
    check_refused(folder, CONFIG | changes, words)


@pytest.mark.parametrize("part", ["qzeros", "scales"])
def test_missing_tensors_are_named(part: str, folder: Path) -> None:
    check_missing(folder, f"model.layers.0.mlp.up_proj.{part}")


def test_a_group_that_is_not_there_is_named(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.g_idx"
    replace(folder, lambda tensors: tensors | {name: np.full(64, 2, np.int32)})
    with pytest.raises(PlancError, match=f"{name} speaks of group 2, there are 2"):
        open_source(str(folder))


def test_without_group_indices_columns_are_in_order(folder: Path) -> None:
    replace(folder, lambda tensors: {name: t for name, t in tensors.items() if not name.endswith("g_idx")})
    with open_source(str(folder)) as source:
        assert set(source.native.values()) == {"int4-wo-g32"}
