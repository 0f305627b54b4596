"""The causal-LM types of the installed transformers: in goes nothing, out comes each type with what its config says.

Whether a model that calls itself a causal one attends to the future shows only when it runs; see `check`.
"""

from dataclasses import dataclass

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from planc.compiler.coverage.small import small
from planc.compiler.source.base import one_line


@dataclass(frozen=True)
class ModelType:
    """A type, and why it is no text decoder of its own, or None. `broken` says why it has no config here."""

    name: str
    excluded: str | None = None
    broken: str | None = None


def types() -> list[ModelType]:
    """Every type, in transformers' order."""
    return [_classed(name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]


def names() -> list[str]:
    """The types' names alone, without a look at their configs."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _classed(name: str) -> ModelType:
    try:
        config = small(name)
    except Exception as e:  # noqa: BLE001 - a config's own code and checks
        return ModelType(name, broken=f"no small config: {one_line(e)}")
    if config.is_encoder_decoder:
        return ModelType(name, excluded="an encoder-decoder")
    if hasattr(config, "cross_attention_hidden_size"):
        return ModelType(name, excluded="the decoder half of an encoder-decoder")
    text = getattr(config, "text_config", None)
    if text is not None and text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return ModelType(name, excluded=f"a multimodal model around {text.model_type}")
    return ModelType(name)
