"""The config of a multimodal model becomes that of its language model, and what transformers drops of it is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planc.errors import PlancError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_UNSCALED = ("default", "mrope")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def language_config(config: PretrainedConfig) -> PretrainedConfig:
    """The text part of a multimodal config whose text part alone is a causal language model; any other as it is.

    What the parent says of the head (tied or not) and of special tokens holds, as it does for transformers' own parent.
    """
    text: PretrainedConfig | None = getattr(config, "text_config", None)
    if text is None or not _is_parent(config, text):
        return config
    text = copy.deepcopy(text)
    if not _is_replaced(config, text) and (tied := getattr(config, "tie_word_embeddings", None)) is not None:
        text.tie_word_embeddings = tied
    for name in _TOKEN_IDS:
        if getattr(text, name, None) is None and (token := getattr(config, name, None)) is not None:
            setattr(text, name, token)
    text.architectures = [_causal_classes()[text.model_type]]
    return text


def _causal_classes() -> dict[str, str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return {kind: made if isinstance(made, str) else made[0] for kind, made in NAMES.items()}


def _is_parent(config: PretrainedConfig, text: PretrainedConfig) -> bool:
    """Whether the model is multimodal, with nothing but its language model between tokens and logits."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as MULTIMODAL

    causal = _causal_classes()
    if text.model_type not in causal or config.model_type not in MULTIMODAL or text.is_encoder_decoder:
        return False
    own = causal.get(config.model_type)
    return own in (None, MULTIMODAL[config.model_type]) or _is_replaced(config, text)


def _is_replaced(config: PretrainedConfig, text: PretrainedConfig) -> bool:
    """Whether transformers' AutoModelForCausalLM itself takes the text part in the place of this config."""
    from transformers import AutoModelForCausalLM

    if type(config) not in AutoModelForCausalLM._model_mapping:
        return False
    return getattr(AutoModelForCausalLM._model_mapping[type(config)], "config_class", None) is type(text)


def check_stated(path: Path, raw: dict[str, Any], config: PretrainedConfig, parent: str | None) -> None:
    """PlancError when config.json states a rotary base or scaling that the config lacks: wrong logits in silence.

    `raw` is the file's content, `parent` a multimodal model's type, of which the text part counts.
    """
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return
    text = raw.get("text_config") or {} if parent is not None else raw
    if lost := set(_bases(text)) - set(_bases(rope)):
        raise _dropped(path, f"rope_theta {min(lost):g}", config)
    for table in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if table.get("rope_type") == "default" and table.get("type", "default") not in _UNSCALED:
            raise _dropped(path, f"rotary scaling of type {table['type']}", config)


def _dropped(path: Path, what: str, config: PretrainedConfig) -> PlancError:
    return PlancError(
        f"{path} has {what}, which transformers does not read for a {config.model_type} model. State it in "
        '"rope_parameters", as {"rope_type": ..., "rope_theta": ...}.'
    )


def _bases(table: dict[str, Any]) -> Iterator[float]:
    """Every `rope_theta` of a table and the tables in it that are no configs of other models."""
    for name, value in table.items():
        if isinstance(value, dict) and not value.get("model_type"):
            yield from _bases(value)
        elif name == "rope_theta" and isinstance(value, (int, float)):
            yield float(value)
