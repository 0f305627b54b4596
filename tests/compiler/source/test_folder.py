"""Hugging Face folders: every tensor reads back, and each kind of damage gives one line that names it."""

import json
import shutil
import struct
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file as save_np
from safetensors.torch import load_file

from planc.compiler.source import new_model, open_source
from planc.compiler.source.safetensors_file import SafetensorsFile
from planc.errors import PlancError
from tests.models import tiny


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("llama", tmp_path_factory.mktemp("single"), tokenizer=False)


@pytest.fixture(scope="module")
def pristine_sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("llama", tmp_path_factory.mktemp("sharded"), tokenizer=False, max_shard_size="100KB")


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "model"))


@pytest.fixture
def sharded(pristine_sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine_sharded, tmp_path / "shards"))


def fails(folder: Path | str, *words: str, **options: bool) -> None:
    """Opening, or reading the config, raises one line with these words."""
    with pytest.raises(PlancError) as caught:
        open_source(str(folder), **options).config()
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_single_file_reads_every_tensor(folder: Path) -> None:
    expected = load_file(folder / "model.safetensors")
    with open_source(str(folder)) as source:
        assert source.name == "model"
        assert set(source.tensors) == set(expected)
        for name, tensor in expected.items():
            assert source.tensors[name].shape == tuple(tensor.shape)
            np.testing.assert_array_equal(source.read(name), tensor.numpy())
            assert source.read(name).flags.writeable


def test_shards_read_every_tensor(sharded: Path, folder: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 3
    with open_source(str(sharded)) as shards, open_source(str(folder)) as single:
        assert shards.tensors == single.tensors
        for name in single.tensors:
            np.testing.assert_array_equal(shards.read(name), single.read(name))


def test_bf16_keeps_its_bits(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path, dtype="bfloat16", tokenizer=False)
    expected = load_file(folder / "model.safetensors")
    with open_source(str(folder)) as source:
        name = "model.embed_tokens.weight"
        assert source.tensors[name].dtype == "bf16"
        assert source.read(name).dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(source.read(name).astype(np.float32), expected[name].float().numpy())


def test_read_allocates_one_tensor(folder: Path) -> None:
    with open_source(str(folder)) as source:
        name = "model.embed_tokens.weight"
        tracemalloc.start()
        source.read(name)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < source.tensors[name].nbytes + 16384


def test_fingerprint_tells_models_apart(folder: Path, tmp_path: Path) -> None:
    other = tiny("llama", tmp_path, tokenizer=False, rms_norm_eps=1e-3)
    same = tiny("llama", tmp_path, seed=5, tokenizer=False)
    prints = [open_source(str(path)).fingerprint() for path in (folder, other, same)]
    assert prints[0] == prints[2] != prints[1]
    assert len(prints[0]) == 64


def test_generation_config_prefers_its_file(folder: Path) -> None:
    assert open_source(str(folder)).generation_config() == {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 0}
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [7, 2, 7], "temperature": 0.6, "_from_model_config": true}'
    )
    stated = open_source(str(folder)).generation_config()
    assert stated == {"bos_token_id": 1, "eos_token_id": [7, 2], "pad_token_id": 0, "temperature": 0.6}
    (folder / "generation_config.json").unlink()
    assert open_source(str(folder)).generation_config()["eos_token_id"] == [2]


def test_missing_folder(tmp_path: Path) -> None:
    fails(tmp_path / "nowhere", "nowhere", "does not exist", "gemma3-270m")


def test_a_file_is_no_folder(folder: Path) -> None:
    fails(folder / "config.json", "config.json", "is a file")


def test_missing_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    fails(folder, "no config.json")


@pytest.mark.parametrize("text", ["{", "[1]", "\udc80"])
def test_invalid_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    fails(folder, "config.json", "JSON")


def test_unknown_model_type(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "no_such_model"}')
    fails(folder, "config.json", "no_such_model", "transformers")


@pytest.mark.parametrize("change", [{"hidden_size": "x"}, {"hidden_size": 65}, {"num_attention_heads": 0}])
def test_config_that_makes_no_sense(folder: Path, change: dict[str, object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    fails(folder, "config.json", "cannot read this config")


@pytest.mark.parametrize("change", [{"model_type": "t5"}, {"hidden_act": "nope"}])
def test_config_without_a_causal_model(folder: Path, change: dict[str, object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(PlancError, match="cannot build a causal language model") as caught:
        new_model(open_source(str(folder)).config())
    assert "\n" not in str(caught.value)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    fails(folder, "no weights", "model.safetensors")
    (folder / "model.gguf").touch()
    fails(folder, "--model", "model.gguf")


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    fails(sharded, "1 of", shard.name)


def test_shard_outside_the_folder(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    fails(sharded, "../model.safetensors")


def test_tensor_missing_from_its_shard(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["model.extra.weight"] = sorted(sharded.glob("*.safetensors"))[0].name
    index.write_text(json.dumps(data))
    fails(sharded, "1 tensors", "model.extra.weight")


def test_index_without_map(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text("{}")
    fails(sharded, "weight_map")


def damage(folder: Path, change) -> None:  # type: ignore[no-untyped-def]
    path = folder / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))


def with_header(change) -> object:  # type: ignore[no-untyped-def]
    """A damage that edits the JSON header and keeps the data."""

    def edit(data: bytes) -> bytes:
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + size :]

    return edit


NORM = "model.norm.weight"
DAMAGES = {
    "empty": (lambda data: b"", ("corrupt", "0 bytes")),
    "short": (lambda data: data[:5], ("corrupt", "5 bytes")),
    "header length": (lambda data: b"\xff" * 8 + data[8:], ("corrupt", "announces a header")),
    "header text": (lambda data: data[:8] + b"?" + data[9:], ("corrupt", "not JSON")),
    "truncated": (lambda data: data[:-1000], ("truncated", "tensor")),
    "trailing bytes": (lambda data: data + b"x", ("corrupt", "describes")),
    "shape": (with_header(lambda h: h[NORM].update(shape=[65])), ("corrupt", NORM, "260")),
    "negative": (with_header(lambda h: h[NORM].update(shape=[-64])), ("corrupt", NORM, "natural")),
    "dtype": (with_header(lambda h: h[NORM].update(dtype="F4")), (NORM, "F4", "supported")),
    "fields": (with_header(lambda h: h[NORM].pop("dtype")), ("corrupt", NORM, "without")),
    "overlap": (with_header(lambda h: h[NORM].update(data_offsets=[0, 256])), ("corrupt", "at byte 0")),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_safetensors(folder: Path, kind: str) -> None:
    change, words = DAMAGES[kind]
    damage(folder, change)
    fails(folder, "model.safetensors", *words)


def test_file_that_shrinks_after_opening(folder: Path) -> None:
    with open_source(str(folder)) as source:
        damage(folder, lambda data: data[:3000])
        with pytest.raises(PlancError, match="truncated"):
            source.read("model.norm.weight")


def test_unknown_tensor_name(folder: Path) -> None:
    with open_source(str(folder)) as source, pytest.raises(PlancError, match="no tensor nothing"):
        source.read("nothing")


def test_pickle_is_refused_then_read(folder: Path) -> None:
    import torch

    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    fails(folder, "pytorch_model.bin", "save_pretrained", "--allow-pickle")
    with open_source(str(folder), allow_pickle=True) as source:
        assert source.tensors[NORM].dtype == "bf16"
        np.testing.assert_array_equal(source.read(NORM).astype(np.float32), tensors[NORM].float().numpy())


@pytest.mark.parametrize("pickled", [False, True])
def test_pieces_are_the_tensor(folder: Path, pickled: bool) -> None:
    import torch

    if pickled:
        tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
        torch.save(tensors, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    with open_source(str(folder), allow_pickle=pickled) as source:
        for name in source.tensors:
            whole, pieces = source.read(name).reshape(-1), list(source.read_pieces(name, 50))
            assert max(piece.size for piece in pieces) <= 50
            np.testing.assert_array_equal(np.concatenate(pieces), whole)


def test_pieces_take_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_np({"x": np.zeros((1 << 12, 1 << 10), np.float32)}, path)
    file = SafetensorsFile(path)
    tracemalloc.start()
    assert sum(piece.size for piece in file.read_pieces("x", 1 << 16)) == 1 << 22
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    file.close()
    assert peak < 1 << 20


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("code of the file ran",)


def test_pickle_runs_no_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    torch.save({"a": _Evil()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    fails(folder, "pytorch_model.bin", "cannot be unpickled safely", allow_pickle=True)
    assert "ran" not in capsys.readouterr().out
