"""A Hugging Face hub id becomes a local folder with the files that compiling needs, through huggingface_hub."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

from planc.compiler.source.base import one_line
from planc.compiler.source.pickle_file import PATTERN, pickle_refused
from planc.errors import PlancError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILES = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
]


def is_hub_id(model: str) -> bool:
    """Whether a name has the form of a hub id: `name` or `owner/name`."""
    return _ID.fullmatch(model) is not None


def download(model: str, *, revision: str | None, allow_pickle: bool, code: bool) -> Path:
    """The snapshot's folder; HF_HUB_OFFLINE and HF_HOME hold.

    PlancError when the hub has no such model or cannot be reached, and when pickles are its only weights and not
    allowed.
    """
    from huggingface_hub import snapshot_download

    wanted = _FILES + (["pytorch_model*"] if allow_pickle else []) + (["*.py"] if code else [])
    try:
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=wanted, ignore_patterns=["*/*"]))
    except Exception as e:  # noqa: BLE001 - network, permission, name and cache errors share no base class
        raise PlancError(
            f"{model} is no folder, no .gguf file and no alias here, and the Hugging Face hub gave nothing: "
            f"{one_line(e)} "
            "Check the name, the network (HF_HUB_OFFLINE) and, for gated models, `hf auth login`."
        ) from None
    if not allow_pickle and not any(folder.glob("*.safetensors")):
        _refuse_pickles(model, revision)
    return folder


def _refuse_pickles(model: str, revision: str | None) -> None:
    """PlancError when the repository has pickled weights, which were not fetched."""
    from huggingface_hub import list_repo_files

    try:
        files = list_repo_files(model, revision=revision)
    except Exception:  # noqa: BLE001 - offline: the folder's own refusal says that it has no weights
        return
    if pickles := sorted(fnmatch.filter(files, PATTERN)):
        raise pickle_refused(f"{model}/{pickles[0]}", repr(model) + (f", revision={revision!r}" if revision else ""))
