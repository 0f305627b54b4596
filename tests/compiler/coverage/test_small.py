"""Small configs: of every type, small, beyond its windows within a prompt, with every kind of its layers."""

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from planc.compiler.coverage.check import DECODE, PROMPT, kinds_of
from planc.compiler.coverage.small import CHUNK, WINDOW, overrides, small
from planc.compiler.coverage.types import names, types
from planc.compiler.coverage.weights import logits, random_model, relative_error

WINDOWS = ("sliding_window", "window_size", "sliding_window_size", "attention_window_size", "attention_chunk_size")
MOST = 20_000_000  # parameters of the largest small model, one of several encoders
KINDS = types()
REFUSE_THEIR_DEFAULTS = (CONFIG_MAPPING["gemma4_assistant"],)
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
    for name, fields in overrides().items():
        kind = CONFIG_MAPPING[name]
        if kind in REFUSE_THEIR_DEFAULTS:
            continue
        known = {*kind().to_dict(), *kind.attribute_map}
        assert not {field for field in fields if field not in known and not field.startswith("swa_")}, name


# What a compiler may get wrong without a crash: each of these, changed a little, must show in the logits.
SHOWS = {
    "gemma2": {"sliding_window": 6, "attn_logit_softcapping": 3.2, "query_pre_attn_scalar": 270, "rms_norm_eps": 4e-3},
    "granite": {"embedding_multiplier": 0.8, "residual_multiplier": 0.8, "attention_multiplier": 0.8},
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 11000.0}, "rms_norm_eps": 4e-3},
    "llama4_text": {"attention_chunk_size": 7, "floor_scale": 17, "attn_scale": 0.15, "no_rope_layers": [1, 1, 0, 0]},
    "deepseek_v3": {"routed_scaling_factor": 2.6, "norm_topk_prob": False, "topk_group": 2, "rope_interleave": False},
    "mixtral": {"num_experts_per_tok": 1},
}


@pytest.mark.parametrize("name", SHOWS)
def test_no_part_of_a_small_model_is_trivial(name: str) -> None:
    model = random_model(small(name))
    ids = torch.arange(4, 4 + PROMPT)
    want = logits(model, ids)
    assert torch.isfinite(want).all()
    for field, value in SHOWS[name].items():
        other = random_model(small(name, **{field: value}))
        assert relative_error(logits(other, ids), want) > 1e-3, field


def test_every_parameter_of_a_small_model_shows() -> None:
    model = random_model(small("gpt_oss"))
    ids = torch.arange(4, 4 + PROMPT)
    want = logits(model, ids)
    for name, parameter in model.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.mul_(1 + 0.1 * torch.rand_like(parameter))
            assert relative_error(logits(model, ids), want) > 1e-4, name
            parameter.copy_(kept)
