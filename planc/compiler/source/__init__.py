"""Checkpoints: a folder, a .gguf file, an alias or a hub id becomes a ModelSource that reads one tensor at a time."""

from __future__ import annotations

from pathlib import Path

from planc.compiler.source.aliases import ALIASES, locate
from planc.compiler.source.base import DTYPES, ModelSource, TensorInfo, new_model
from planc.compiler.source.bind import Binding, bind
from planc.compiler.source.described import DescribedSource, config_file, described
from planc.compiler.source.folder import FolderSource, has_weights
from planc.compiler.source.hub import download, is_hub_id
from planc.compiler.source.quantized import dequantized
from planc.errors import PlancError

__all__ = [
    "ALIASES",
    "DTYPES",
    "Binding",
    "DescribedSource",
    "ModelSource",
    "TensorInfo",
    "bind",
    "new_model",
    "open_source",
]


def open_source(
    model: str,
    *,
    allow_pickle: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    weights: bool = True,
) -> ModelSource:
    """Opens a model by folder, .gguf file, alias or Hugging Face hub id (tried in the order alias, path, hub).

    Without `weights`, a config is enough: that of a folder, or one that comes with planc (`described`). `revision` is
    the hub's branch, tag or commit. Only headers are read. PlancError says what is missing or damaged, and the next
    step.
    """
    path = Path(model).expanduser()
    if model in described() and not path.exists():
        known = DescribedSource(config_file(model), model, trust_remote_code=trust_remote_code)
        if weights:
            raise known.no_bytes()
        return known
    if model in ALIASES:
        return _gguf(locate(model), model)
    if path.is_file() or path.suffix == ".gguf":
        return _open_file(path)
    if path.is_dir() and not weights and (path / "config.json").is_file() and not has_weights(path):
        return DescribedSource(path, path.resolve().name, trust_remote_code=trust_remote_code)
    if path.is_dir():
        return dequantized(FolderSource(path, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code))
    if not is_hub_id(model):
        raise PlancError(
            f"{model} does not exist. Give a model folder, a .gguf file, a hub id or one of {', '.join(ALIASES)}; with "
            f"--weights none also {', '.join(described())}."
        )
    folder = download(model, revision=revision, allow_pickle=allow_pickle, code=trust_remote_code)
    source = FolderSource(folder, name=model, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    return dequantized(source)


def _open_file(path: Path) -> ModelSource:
    if path.suffix != ".gguf":
        raise PlancError(
            f"{path} is a file; expected a model folder or a .gguf file. Give the folder that holds config.json."
        )
    if not path.is_file():
        raise PlancError(f"{path} does not exist. Check the path of the .gguf file.")
    return _gguf(path, path.stem)


def _gguf(path: Path, name: str) -> ModelSource:
    from planc.compiler.source.gguf import GGUFSource

    return GGUFSource(path, name=name)
