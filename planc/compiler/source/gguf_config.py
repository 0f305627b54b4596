"""GGUF metadata becomes a transformers config; what transformers' loader drops in silence is restored or refused.

The loader (5.24) ignores rotary scaling, soft caps and some sliding windows; a model without them still talks, only
worse.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from planc.compiler.source.base import one_line
from planc.compiler.source.gguf_header import GGUFHeader, corrupt, outline
from planc.errors import PlancError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Metadata that transformers' table does not read, and the config field that must say the same.
_FIELDS = {
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
}
# Metadata that says nothing about the arithmetic.
_HARMLESS = {
    "vocab_size",
    "context_length",
    "tensor_data_layout",
    "attention.causal",
    "feed_forward_length",
    "use_parallel_residual",
}
# Llama 3.1 and 3.2 differ in `factor` alone, https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LONGROPE = ("rope_factors_long.weight", "rope_factors_short.weight")
_SCALING = {
    "factor": "factor",
    "attn_factor": "attention_factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_ADVICE = "Use the model's Hugging Face folder."


def load_config(
    path: Path, header: GGUFHeader, architecture: str, vector: Callable[[str], np.ndarray[Any, Any]]
) -> PretrainedConfig:
    """The config of a GGUF file; PlancError when transformers has no loader for it or would drop something.

    `vector` reads a GGUF tensor by name as float32.
    """
    if "token_embd.weight" not in header.tensors:
        raise corrupt(path, "it has no tensor token_embd.weight")
    config = _by_transformers(path, header, architecture)
    config.vocab_size = header.tensors["token_embd.weight"].shape[0]
    config._name_or_path = ""
    config.architectures = [causal_class(config.model_type)]
    _restore_fields(config, header, architecture)
    _restore_rope(config, header, architecture, vector)
    return config


def causal_class(model_type: str) -> str:
    """The class name of a model type's causal language model; PlancError when transformers has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    if model_type not in NAMES:
        raise PlancError(
            f"model type {model_type} has no causal language model in transformers; planc compiles decoders."
        )
    found = NAMES[model_type]
    return found if isinstance(found, str) else found[0]


def llama3_parameters(divisors: np.ndarray[Any, Any], theta: float) -> dict[str, Any]:
    """The llama3 rope parameters whose frequency divisors are f32[head_dim/2] `divisors`; PlancError if none are."""
    found = {"rope_type": "llama3", "factor": float(np.round(divisors.max(), 4)), **_LLAMA3}
    if not np.allclose(_llama3_divisors(found, theta, divisors.size), divisors, rtol=1e-3):
        raise PlancError(f"rope_freqs.weight is not Llama 3's frequency scaling. {_ADVICE}")
    return found


def _by_transformers(path: Path, header: GGUFHeader, architecture: str) -> PretrainedConfig:
    import transformers

    with tempfile.TemporaryDirectory(prefix="planc-gguf-") as folder, _quiet():
        Path(folder, "outline.gguf").write_bytes(outline(header))
        try:
            return transformers.AutoConfig.from_pretrained(folder, gguf_file="outline.gguf", local_files_only=True)
        except Exception as e:  # noqa: BLE001 - config classes validate with many kinds of errors
            raise PlancError(
                f"{path}: transformers {transformers.__version__} cannot make a config of GGUF "
                f"architecture {architecture}: {one_line(e)} {_ADVICE}"
            ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the loader's warning that the outline has no vocabulary."""
    logger = logging.getLogger("transformers.modeling_gguf_pytorch_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _restore_fields(config: PretrainedConfig, header: GGUFHeader, architecture: str) -> None:
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    known = GGUF_CONFIG_MAPPING.get(architecture) or GGUF_CONFIG_MAPPING.get(config.model_type, {})
    for key, value in header.metadata.items():
        name = key.removeprefix(f"{architecture}.")
        if name == key or name in known or name in _HARMLESS or name.startswith("rope."):
            continue
        field = _FIELDS.get(name)
        if field is None or not hasattr(config, field):
            raise PlancError(f"GGUF metadata {key} = {value} has no place in a {config.model_type} config. {_ADVICE}")
        setattr(config, field, value)


def _restore_rope(
    config: PretrainedConfig, header: GGUFHeader, architecture: str, vector: Callable[[str], np.ndarray[Any, Any]]
) -> None:
    """Sets config.rope_parameters from `<arch>.rope.scaling.*` or the tensor rope_freqs.weight."""
    kind = header.metadata.get(f"{architecture}.rope.scaling.type", "none")
    longrope = [name for name in _LONGROPE if name in header.tensors]
    freqs = "rope_freqs.weight" in header.tensors
    if kind == "none" and not longrope and not freqs:
        return
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("rope_type") != "default":
        rope, kind = {}, f"{kind} of a {config.model_type}"
    if rope and freqs:
        rope.update(llama3_parameters(vector("rope_freqs.weight"), rope["rope_theta"]))
    elif rope and kind in ("linear", "yarn") and not longrope:
        stated = {ours: header.metadata.get(f"{architecture}.rope.scaling.{key}") for key, ours in _SCALING.items()}
        rope.update({"rope_type": kind, **{key: value for key, value in stated.items() if value is not None}})
    else:
        raise PlancError(
            f"GGUF architecture {architecture}: rope scaling {'longrope' if longrope else kind} is not read. {_ADVICE}"
        )


def _llama3_divisors(parameters: dict[str, Any], theta: float, pairs: int) -> np.ndarray[Any, Any]:
    """1 for short wavelengths, `factor` for long ones, smooth between: what divides the inverse frequencies."""
    wavelength = 2 * np.pi * theta ** (np.arange(pairs) / pairs)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    smooth = np.clip((parameters["original_max_position_embeddings"] / wavelength - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / parameters["factor"] + smooth)
