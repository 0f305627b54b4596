"""Small configs: of every type, small, beyond its windows within a prompt, with every kind of its layers."""

import pytest
import torch

from planc.compiler.coverage.check import DECODE, PROMPT, kinds_of
from planc.compiler.coverage.small import CHUNK, OWN, WINDOW, overrides, small
from planc.compiler.coverage.types import names, types
from planc.compiler.coverage.weights import logits, random_model, relative_error

WINDOWS = ("sliding_window", "window_size", "sliding_window_size", "attention_window_size", "attention_chunk_size")
MOST = 20_000_000  # parameters of the largest small model, one of several encoders
KINDS = types()
DECODERS = [kind.name for kind in KINDS if not kind.excluded and not kind.broken]


def test_every_type_is_listed_and_has_a_config() -> None:
    assert [kind.name for kind in KINDS] == names()
    assert not [kind for kind in KINDS if kind.broken]
    assert len(DECODERS) > 140


def test_types_that_are_no_decoders_are_told_by_their_configs() -> None:
    excluded = {kind.name: kind.excluded for kind in KINDS}
    assert excluded["bart"] == "an encoder-decoder"
    assert excluded["gemma3"] == "a multimodal model around gemma3_text"
    assert excluded["gemma3_text"] is None


@pytest.mark.parametrize("name", DECODERS)
def test_a_small_model_is_small(name: str) -> None:
    from planc.compiler.source.base import new_model

    config = small(name)
    text = config.get_text_config()
    for field in WINDOWS:
        assert (getattr(text, field, None) or 0) in (0, WINDOW, CHUNK, WINDOW + 1), field
    assert sum(p.numel() for p in new_model(config).parameters()) < MOST
    longest = getattr(text, "max_position_embeddings", None) or -1
    assert longest == -1 or longest >= PROMPT + DECODE


def test_every_kind_of_layer_is_kept() -> None:
    assert kinds_of(small("gemma3_text")) == "sliding, full"
    assert small("deepseek_v3").first_k_dense_replace < small("deepseek_v3").num_hidden_layers
    assert kinds_of(small("cwm")) == "full, sliding, llama3"
    config = small("gpt_oss")
    assert kinds_of(config) == "sliding, full, experts, yarn"
    assert config.rope_parameters["original_max_position_embeddings"] < PROMPT


def test_overrides_name_types_and_fields_that_exist() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for name, fields in overrides().items():
        assert fields, name
        known = {*CONFIG_MAPPING[name]().to_dict(), *CONFIG_MAPPING[name].attribute_map} if name in DECODERS else fields
        unknown = {f for f in fields if f not in known and not f.startswith("swa_")}
        assert not {f for f in unknown if fields[f] == OWN}, name


def test_no_part_of_a_random_model_is_trivial() -> None:
    """A window, a cap, a bias or a norm left out must show."""
    ids = torch.arange(4, 204)
    config = small("gemma2")
    model = random_model(config)
    want = logits(model, ids)
    assert torch.isfinite(want).all()
    for fields in ({"sliding_window": 300}, {"attn_logit_softcapping": None}, {"query_pre_attn_scalar": 24}):
        other = random_model(small("gemma2", **fields))
        assert relative_error(logits(other, ids), want) > 1e-3, fields
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.zero_()
    assert relative_error(logits(model, ids), want) > 1e-3
