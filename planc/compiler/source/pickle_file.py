"""Pickle checkpoints are refused with the way to convert them, or become tables of tensors if allowed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from planc.compiler.source.base import TensorInfo, one_line
from planc.errors import PlancError

if TYPE_CHECKING:
    import torch

    from planc.compiler.source.folder import TensorFile

PATTERN = "pytorch_model*.bin"
_NAMES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "bool",
}


class PickleFile:
    """One .bin file, mapped and unpickled with torch's weights-only unpickler, which runs no code of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state = {name: tensor for name, tensor in _unpickle(path).items() if _is_tensor(tensor)}
        self.tensors = {
            name: TensorInfo(_dtype_name(path, name, tensor), tuple(tensor.shape))
            for name, tensor in self._state.items()
        }

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """A copy of one tensor."""
        return _copied(self._state[name])

    def read_pieces(self, name: str, count: int) -> Iterator[np.ndarray[Any, Any]]:
        """The tensor's elements in order, flat, at most `count` at a time; the file stays mapped."""
        for piece in self._state[name].detach().reshape(-1).split(count):
            yield _copied(piece)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        """A copy of some rows of one tensor."""
        return _copied(self._state[name][start:stop])

    def close(self) -> None:
        self._state = {}


def pickle_names(path: Path) -> list[str]:
    """The pickle weight files of a folder, sorted."""
    return sorted(file.name for file in path.glob(PATTERN))


def open_pickles(path: Path, allow: bool) -> dict[str, TensorFile]:
    """Tensor name to file; PlancError unless `allow`."""
    names = pickle_names(path)
    if not allow:
        raise pickle_refused(f"{path / names[0]}", f"'{path}'")
    return {tensor: file for file in map(PickleFile, (path / name for name in names)) for tensor in file.tensors}


def pickle_refused(file: str, model: str) -> PlancError:
    """The refusal of a pickle; `model` is what from_pretrained takes to load it, as Python text."""
    return PlancError(
        f"{file} is a pickle, which can run code when it is loaded. Convert it once: "
        'python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained({model}).save_pretrained('OUT')\", or pass --allow-pickle (weights_only unpickling)."
    )


def _copied(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    import torch

    tensor = tensor.detach().contiguous().clone()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _unpickle(path: Path) -> dict[str, Any]:
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # noqa: BLE001 - the unpickler raises many kinds; each means that the file cannot be used
        raise PlancError(f"{path} cannot be unpickled safely: {one_line(e)} Convert it to safetensors.") from None
    if not isinstance(state, dict):
        raise PlancError(f"{path} holds a {type(state).__name__}, a dict of tensors was expected.")
    return state


def _is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _dtype_name(path: Path, name: str, tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _NAMES:
        raise PlancError(f"{path}: tensor {name} has dtype {dtype}; supported are {', '.join(_NAMES)}.")
    return _NAMES[dtype]
