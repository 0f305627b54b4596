"""A model that is described and not at hand: in goes a config alone, out comes a ModelSource without bytes.

Its tensors are what the model's code makes of the config, under the names that the code gives them, in bf16. That is
enough for `--weights none`: packing weights later binds the checkpoint's own tensors to these names.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planc.compiler.source.base import ModelSource, TensorInfo, new_model
from planc.compiler.source.folder import load_config, read_json
from planc.compiler.source.parent import check_stated, language_config
from planc.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from transformers import PretrainedConfig

_MODELS = Path(__file__).parent / "models"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def described() -> list[str]:
    """Names of the models whose configs come with planc."""
    return sorted(path.stem for path in _MODELS.glob("*.json"))


def config_file(name: str) -> Path:
    """Where the config of a described model lies."""
    return _MODELS / f"{name}.json"


class DescribedSource(ModelSource):
    """The model of a config: of a file, or of a folder that has no weights beside it."""

    def __init__(self, path: Path, name: str, *, trust_remote_code: bool = False) -> None:
        self.path, self.name, self.trust_remote_code = path, name, trust_remote_code

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:  # type: ignore[override]
        """Every parameter and persistent buffer once, as in the model's own code."""
        model = new_model(self._config, trust_remote_code=self.trust_remote_code)
        first = {id(t): name for name, t in reversed(model.state_dict(keep_vars=True).items())}
        named = {name: t for name, t in model.state_dict(keep_vars=True).items() if first[id(t)] == name}
        return {name: TensorInfo("bf16", tuple(t.shape)) for name, t in named.items()}

    @cached_property
    def _config(self) -> PretrainedConfig:
        stated = load_config(self.path, self.trust_remote_code)
        config = language_config(stated)
        if config is not stated:
            self.parent_type = stated.model_type
        file = self.path / "config.json" if self.path.is_dir() else self.path
        check_stated(file, read_json(file), config, self.parent_type)
        return config

    def config(self) -> PretrainedConfig:
        return self._config

    @property
    def has_tokenizer(self) -> bool:
        """Whether the config's folder holds a tokenizer too."""
        return self.path.is_dir() and any((self.path / name).is_file() for name in _TOKENIZERS)

    def read(self, name: str) -> np.ndarray[Any, Any]:
        raise self.no_bytes()

    def no_bytes(self) -> UsageError:
        """The error of wanting what a description does not hold."""
        return UsageError(
            f"{self.name} is known by its config alone; pass --weights none to build its code, or --model with a "
            "folder that holds its weights."
        )
