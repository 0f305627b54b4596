"""tuning.json: what is written reads back, another file is refused by name, and a write that fails leaves the old."""

import json
import os
from pathlib import Path

import pytest

from planc.errors import PlancError, UsageError
from planc.plans.tuning import Blocking, CpuEntry, CpuProduct, Entry, Product, Tile, load, save

PRODUCT = Product("qlinear", "f8e4m3", "fp8", 4096, 14336, 16)
TILE = Tile(64, 32, 128, 4, 8)
ENTRIES = [
    Entry("h100-sxm", PRODUCT, TILE, 23.5, "NVIDIA H100 80GB HBM3"),
    Entry(
        "l4", Product("expert_linear", "f32", "bf16", 64, 96, 40, experts=8, ragged=True), Tile(16, 32, 64, 4, 2), 7.0
    ),
]
CPU_ENTRIES = [
    CpuEntry("cpu:portable", CpuProduct("linear", "bf16", 64, 96), Blocking(panel_k=256), 0.9, 2, "a CPU"),
    CpuEntry("cpu:x86-64-v4+vnni", CpuProduct("qexpert_linear", "int8", 64, 96, experts=8), Blocking(), 1.0),
]


def test_entries_read_back_and_the_bytes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    save(path, ENTRIES)
    found = load(path)
    assert list(found.entries) == ENTRIES
    assert found.of("h100-sxm") == {PRODUCT: TILE}
    assert found.of("sm_90a") == {}
    save(tmp_path / "other.json", ENTRIES)
    assert load(tmp_path / "other.json").sha256 == found.sha256
    save(path, ENTRIES[:1])
    assert load(path).sha256 != found.sha256
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other.json", "tuning.json"]


def test_a_file_holds_gpus_and_cpus(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    save(path, ENTRIES, CPU_ENTRIES)
    found = load(path)
    assert (list(found.entries), list(found.cpu_entries)) == (ENTRIES, CPU_ENTRIES)
    assert found.blockings("cpu:portable") == {CPU_ENTRIES[0].product: Blocking(panel_k=256)}
    assert found.targets == ["cpu:portable", "cpu:x86-64-v4+vnni", "h100-sxm", "l4"]
    assert len(path.read_text().splitlines()) == 3 + len(ENTRIES) + len(CPU_ENTRIES), "an entry a line"


def test_a_blocking_that_names_another_choice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    save(path, [], CPU_ENTRIES[:1])
    path.write_text(path.read_text().replace("panel_k", "panel_rows"))
    with pytest.raises(UsageError, match=r"cpu_entries\[0\].blocking.panel_rows is not a field"):
        load(path)
    save(path, [], CPU_ENTRIES[:1] * 2)
    with pytest.raises(UsageError, match=r"two entries for linear by bf16 \[64, 96\] on cpu:portable"):
        load(path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data | {"version": 2}, "has version 2, this planc reads 1"),
        (lambda data: data["entries"], "should be an object"),
        (
            lambda data: data | {"entries": data["entries"] * 2},
            "two entries for qlinear of 16 rows of f8e4m3 by fp8 .4096",
        ),
        (lambda data: data | {"more": 1}, "tuning.more is not a field"),
        (lambda data: _with(data, "tile", {"bm": 64}), r"entries\[0\].tile.bn is missing"),
        (
            lambda data: _with(data, "microseconds", "fast"),
            r"entries\[0\].microseconds should be a value of type float",
        ),
    ],
)
def test_what_is_no_tuning_file_is_refused(change, told: str, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    save(path, ENTRIES[:1])
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(UsageError, match=told):
        load(path)


def _with(data: dict, field: str, value: object) -> dict:
    return data | {"entries": [data["entries"][0] | {field: value}]}


def test_a_file_that_is_missing_or_no_json_names_planc_tune(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory; planc tune writes"):
        load(tmp_path / "none.json")
    (tmp_path / "text").write_text("tiles")
    with pytest.raises(UsageError, match=r"is no tuning file: .*planc tune writes"):
        load(tmp_path / "text")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuning.json"
    save(path, ENTRIES[:1])

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PlancError, match=r"tuning.json cannot be written \(No space left"):
        save(path, ENTRIES)
    monkeypatch.undo()
    assert list(load(path).entries) == ENTRIES[:1]
    assert [p.name for p in tmp_path.iterdir()] == ["tuning.json"]
