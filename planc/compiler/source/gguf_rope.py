"""Rotary scaling that GGUF metadata and tensors state, and transformers' GGUF loader drops, is written into the config, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from planc.compiler.source.gguf_header import GGUFHeader
from planc.errors import PlancError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Llama 3.1 and 3.2 differ in `factor` alone, https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_TENSORS = ("rope_factors_long.weight", "rope_factors_short.weight")
_PARAMETERS = {
    "factor": "factor",
    "attn_factor": "attention_factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def apply_rope_scaling(
    config: PretrainedConfig, header: GGUFHeader, architecture: str, vector: Callable[[str], np.ndarray[Any, Any]]
) -> None:
    """Sets config.rope_parameters from `<arch>.rope.scaling.*` or the tensor rope_freqs.weight; PlancError when it cannot.

    `vector` reads a GGUF tensor by name as float32.
    """
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_type" not in rope or rope["rope_type"] != "default":
        return
    if any(name in header.tensors for name in _TENSORS):
        raise PlancError(f"{architecture}: longrope factors in a GGUF file are not supported. Use the model's Hugging Face folder.")
    if "rope_freqs.weight" in header.tensors:
        rope.update(llama3_parameters(vector("rope_freqs.weight"), rope["rope_theta"]))
        return
    kind = header.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        stated = {ours: header.metadata.get(f"{architecture}.rope.scaling.{key}") for key, ours in _PARAMETERS.items()}
        rope.update({"rope_type": kind, **{key: value for key, value in stated.items() if value is not None}})
    elif kind != "none":
        raise PlancError(f"{architecture}: rope scaling {kind} in a GGUF file is not supported. Use the model's Hugging Face folder.")


def llama3_parameters(divisors: np.ndarray[Any, Any], theta: float) -> dict[str, Any]:
    """The llama3 rope parameters whose frequency divisors are `divisors` (f32[head_dim/2]); PlancError when none are."""
    found = {"rope_type": "llama3", "factor": float(np.round(divisors.max(), 4)), **_LLAMA3}
    if not np.allclose(_llama3_divisors(found, theta, divisors.size), divisors, rtol=1e-3):
        raise PlancError("rope_freqs.weight is not Llama 3's frequency scaling. Use the model's Hugging Face folder.")
    return found


def _llama3_divisors(parameters: dict[str, Any], theta: float, pairs: int) -> np.ndarray[Any, Any]:
    """1 for short wavelengths, `factor` for long ones, smooth between: what divides the inverse frequencies."""
    wavelength = 2 * np.pi * theta ** (np.arange(pairs) / pairs)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    smooth = np.clip((parameters["original_max_position_embeddings"] / wavelength - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / parameters["factor"] + smooth)
