"""A Hugging Face model folder (config.json and weights, single or sharded) becomes a ModelSource."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from planc.compiler.source.base import PIECE, ModelSource, TensorInfo, normalize_generation, one_line
from planc.compiler.source.parent import check_stated, language_config
from planc.compiler.source.safetensors_file import SafetensorsFile
from planc.errors import PlancError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class TensorFile(Protocol):
    """One file of a checkpoint."""

    path: Path
    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> np.ndarray[Any, Any]: ...

    def read_pieces(self, name: str, count: int) -> Iterator[np.ndarray[Any, Any]]: ...

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]: ...

    def close(self) -> None: ...


class FolderSource(ModelSource):
    """Opens every shard's header at once, so that a bad checkpoint is refused before any work."""

    def __init__(
        self, path: Path, *, name: str | None = None, allow_pickle: bool = False, trust_remote_code: bool = False
    ) -> None:
        self.path, self.name, self.trust_remote_code = path, name or path.resolve().name, trust_remote_code
        if not (path / "config.json").is_file():
            raise PlancError(
                f"{path} has no config.json. Point --model at the folder that holds the model's config.json."
            )
        read_json(path / "config.json")
        self._config: PretrainedConfig | None = None
        self._owner = _open_tensors(path, allow_pickle)
        self.tensors = {tensor: file.tensors[tensor] for tensor, file in self._owner.items()}

    def config(self) -> PretrainedConfig:
        if self._config is None:
            stated = load_config(self.path, self.trust_remote_code)
            config = language_config(stated)
            if config is not stated:
                self.parent_type = stated.model_type
            check_stated(self.path / "config.json", read_json(self.path / "config.json"), config, self.parent_type)
            self._config = config
        return self._config

    def read(self, name: str) -> np.ndarray[Any, Any]:
        return self._file_of(name).read(name)

    def read_pieces(self, name: str, count: int = PIECE) -> Iterator[np.ndarray[Any, Any]]:
        return self._file_of(name).read_pieces(name, count)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        return self._file_of(name).read_rows(name, start, stop)

    def _file_of(self, name: str) -> TensorFile:
        if name not in self._owner:
            raise PlancError(f"{self.path} has no tensor {name}; it has {len(self._owner)} others.")
        return self._owner[name]

    def generation_config(self) -> dict[str, Any]:
        fallback = super().generation_config()
        path = self.path / "generation_config.json"
        if not path.is_file():
            return fallback
        stated = normalize_generation(read_json(path))
        if not stated["eos_token_id"]:
            del stated["eos_token_id"]
        return {**fallback, **stated}

    def close(self) -> None:
        for file in set(self._owner.values()):
            file.close()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file; PlancError names the file and the position when it is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlancError(f"{path} is missing. Fetch the model again.") from None
    except ValueError as e:
        raise PlancError(f"{path} is not valid JSON ({e}). Fetch the file again or repair it.") from None
    if not isinstance(data, dict):
        raise PlancError(f"{path} holds a JSON {type(data).__name__}, an object was expected.")
    return data


def load_config(path: Path, trust_remote_code: bool) -> PretrainedConfig:
    """The config of a folder, or of a file by itself; PlancError when transformers cannot read it."""
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as e:  # noqa: BLE001 - config classes validate with many kinds of errors
        raise PlancError(
            f"{path / 'config.json' if path.is_dir() else path}: transformers {transformers.__version__} cannot read "
            f"this config: {one_line(e)} If the model brings its own code, pass --trust-remote-code."
        ) from None


def _open_tensors(path: Path, allow_pickle: bool) -> dict[str, TensorFile]:
    """Tensor name to the open file that holds it."""
    if (path / INDEX).is_file():
        return _open_sharded(path, read_json(path / INDEX))
    if (path / SINGLE).is_file():
        file = SafetensorsFile(path / SINGLE)
        return dict.fromkeys(file.tensors, file)
    from planc.compiler.source.pickle_file import open_pickles, pickle_names

    if pickle_names(path):
        return open_pickles(path, allow_pickle)
    if found := sorted(file.name for file in path.glob("*.gguf")):
        raise PlancError(f"{path} holds GGUF files, not safetensors. Name the file: --model {path / found[0]}")
    raise PlancError(
        f"{path} has no weights: neither {SINGLE} nor {INDEX}. Fetch the model's safetensors files; --weights none "
        "builds the code without."
    )


def has_weights(path: Path) -> bool:
    """Whether a folder holds weights of any kind, or an index of them."""
    from planc.compiler.source.pickle_file import pickle_names

    return (path / INDEX).is_file() or (path / SINGLE).is_file() or bool(pickle_names(path))


def _open_sharded(path: Path, index: dict[str, Any]) -> dict[str, TensorFile]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise PlancError(f"{path / INDEX} has no weight_map from tensor names to file names. Fetch the file again.")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if Path(name).name != name or not (path / name).is_file()]
    if missing:
        raise PlancError(f"{path}: {len(missing)} of {len(names)} shards are missing, first {missing[0]}. Fetch them.")
    shards: dict[str, TensorFile] = {}
    try:
        for name in names:
            shards[name] = SafetensorsFile(path / name)
        _check_index(path, weight_map, shards)
    except BaseException:
        for file in shards.values():
            file.close()
        raise
    return {tensor: shards[shard] for tensor, shard in weight_map.items()}


def _check_index(path: Path, weight_map: dict[str, str], shards: dict[str, TensorFile]) -> None:
    absent = [tensor for tensor, shard in weight_map.items() if tensor not in shards[shard].tensors]
    if absent:
        raise PlancError(
            f"{path}: {len(absent)} tensors of {INDEX} are not in their shard, "
            f"first {absent[0]} in {weight_map[absent[0]]}. Fetch the shard and the index of the same revision."
        )
