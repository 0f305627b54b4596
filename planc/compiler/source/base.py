"""What every checkpoint format offers: a config, a table of tensors, and the bytes of one tensor at a time."""

from __future__ import annotations

import copy
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from planc.errors import PlancError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DTYPES: dict[str, np.dtype[Any]] = {
    "f64": np.dtype(np.float64),
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f8e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "f8e8m0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "i64": np.dtype(np.int64),
    "i32": np.dtype(np.int32),
    "i16": np.dtype(np.int16),
    "i8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "u4": np.dtype(np.uint8),  # one code 0..15 a byte
    "bool": np.dtype(np.bool_),
}

PIECE = 1 << 20  # elements
PARTS = ("q", "s", "z")  # of a tensor that the checkpoint holds quantized: codes, scales, zero points

# What a config says about where and by what it was written, not about the model.
VOLATILE = ("_name_or_path", "_model_name_or_path", "transformers_version", "_commit_hash")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")


class NoAttentionInterface(PlancError):
    """The model's code knows its own kinds of attention only."""


@dataclass(frozen=True)
class TensorInfo:
    """dtype (a key of DTYPES) and shape of a checkpoint's tensor, as `ModelSource.read` returns it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def part_of(name: str) -> tuple[str, str]:
    """A tensor's name, and the part of it that `name` asks for: one of PARTS, or "" for the tensor itself."""
    plain, _, part = name.rpartition(":")
    return (plain, part) if plain and part in PARTS else (name, "")


class ModelSource(ABC):
    """A checkpoint opened for reading. Opening reads headers, and what tells how a quantized one groups its columns;
    `read` reads the bytes of one tensor.

    A tensor that is stored quantized reads as floats under its own name. If a scheme of ir/quant.py holds what is
    stored, `native` names it, and `name:q`, `name:s`, `name:z` are tensors too, in that scheme's layouts. Those
    in `transposed` are parameters once their last two axes are swapped. `notes` are lines that a build has to say.
    `requantizes`: its floats may be rounded again, to a scheme that a build asks for.
    """

    name: str
    path: Path
    tensors: dict[str, TensorInfo]
    trust_remote_code: bool = False
    native: Mapping[str, str] = MappingProxyType({})
    transposed: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    requantizes: bool = False
    parent_type: str | None = None  # the multimodal model's type when config() is that of its language model

    @abstractmethod
    def config(self) -> PretrainedConfig:
        """The model's transformers config; PlancError when transformers does not know it."""

    @property
    def plain_names(self) -> list[str]:
        """The tensors that are no parts of others."""
        return [name for name in self.tensors if part_of(name)[0] == name or part_of(name)[0] not in self.native]

    @abstractmethod
    def read(self, name: str) -> np.ndarray[Any, Any]:
        """One tensor as a fresh, writable, C-contiguous array of its info's dtype and shape; bf16 is
        ml_dtypes.bfloat16.

        Memory: the tensor, plus a few MiB. PlancError when the file ends early or the name is unknown.
        """

    def read_pieces(self, name: str, count: int = PIECE) -> Iterator[np.ndarray[Any, Any]]:
        """The elements of `read(name)` in order, flat, at most `count` at a time.

        Memory: one piece where the format stores the tensor as it reads it, else the tensor.
        """
        flat = self.read(name).reshape(-1)
        for start in range(0, flat.size, count):
            yield flat[start : start + count]

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        """`read(name)[start:stop]`. Memory: those rows where the format stores the tensor as it reads it."""
        return self.read(name)[start:stop]

    def generation_config(self) -> dict[str, Any]:
        """bos, eos and pad ids (eos always a list) and the sampling parameters that the checkpoint recommends."""
        config = self.config().get_text_config()
        return normalize_generation({key: getattr(config, key, None) for key in _TOKEN_IDS})

    def fingerprint(self) -> str:
        """sha256 (hex) over the canonical config and every tensor's name, dtype and shape."""
        config = json.loads(self.config().to_json_string(use_diff=False))
        kept = {key: value for key, value in config.items() if key not in VOLATILE}
        table = sorted((name, info.dtype, list(info.shape)) for name, info in self.tensors.items())
        return hashlib.sha256(json.dumps([kept, table], sort_keys=True).encode()).hexdigest()

    def close(self) -> None:
        """Releases the files; reading afterwards is an error."""
        return

    def __enter__(self) -> ModelSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")


def most_positions(config: PretrainedConfig) -> int | None:
    """The longest sequence that a config speaks of, by any of the names in use; None when it sets no limit."""
    text = config.get_text_config()
    found = (getattr(text, name, None) for name in _POSITIONS)
    return next((n for n in found if isinstance(n, int) and n > 0), None)


def new_model(
    config: PretrainedConfig,
    *,
    device: str = "meta",
    trust_remote_code: bool = False,
    dtype: str = "float32",
    attention: str = "eager",
) -> PreTrainedModel:
    """The causal language model of a config in eval mode; on "meta" no parameter or buffer is allocated.

    `dtype` is a torch dtype's name, `attention` an implementation's name in transformers. The config is not
    changed. PlancError when the type has no such model, or its code rejects the config or the attention.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device(device):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),
                dtype=getattr(torch, dtype),
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
            ).eval()
    except Exception as e:  # noqa: BLE001 - model code fails in its own ways on a config that does not fit it
        if isinstance(e, KeyError) and e.args == (attention,):
            raise NoAttentionInterface(
                f"the attention of model type {config.model_type} does not go through transformers' attention interface"
            ) from None
        raise PlancError(
            f"transformers cannot build a causal language model of type {config.model_type}: {one_line(e)} "
            "Check config.json; if the model brings its own code, pass --trust-remote-code."
        ) from None
    return model


def normalize_generation(raw: dict[str, Any]) -> dict[str, Any]:
    """Token ids and recommended sampling parameters that are set; eos_token_id becomes a list of distinct ids."""
    kept = {key: raw[key] for key in (*_TOKEN_IDS, *_SAMPLING) if raw.get(key) is not None}
    eos = kept.get("eos_token_id", [])
    kept["eos_token_id"] = list(dict.fromkeys(eos if isinstance(eos, list) else [eos]))
    return kept


def one_line(error: BaseException) -> str:
    """Another library's message as one sentence of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = f"unknown key {text}" if isinstance(error, KeyError) else text
    text = text if len(text) <= 200 else text[:197] + "..."
    return text if text.endswith((".", "!")) else text + "."
