"""Checkpoints as they are in the wild: parents' prefixes, and configs of older versions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

from planc.compiler.reference import reference_logits
from planc.compiler.source import bind, new_model, open_source
from planc.compiler.source.bind import Binding
from planc.errors import PlancError
from tests.models import tiny
from tests.moe import MOE

IDS = [5, 9, 100, 4, 7, 8, 3, 99, 101, 12, 23, 33, 44, 7]
TEXT: dict[str, Any] = dict(
    vocab_size=301,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    pad_token_id=0,
)
EYES = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=28, patch_size=14
)
TYPES = ["sliding_attention", "full_attention"]
PARENTS: dict[str, dict[str, Any]] = {
    "llava": dict(
        text_config=TEXT | dict(model_type="llama"), vision_config=EYES | dict(model_type="clip_vision_model")
    ),
    "mistral3": dict(text_config=TEXT | dict(model_type="mistral"), vision_config=EYES | dict(model_type="pixtral")),
    "gemma3": dict(text_config=TEXT | dict(sliding_window=5, layer_types=TYPES), vision_config=EYES),
    "idefics3": dict(text_config=TEXT | dict(model_type="llama"), vision_config=EYES),
    "fuyu": dict(text_config=TEXT | dict(model_type="persimmon")),
    "llama4": dict(
        text_config=TEXT | dict(num_local_experts=4, moe_layers=[1], intermediate_size_mlp=96),
        vision_config=EYES | dict(vision_output_dim=32, projector_input_dim=32, projector_output_dim=32),
    ),
}  # fmt: skip


def logits(folder: Path) -> np.ndarray[Any, Any]:
    """The judge's."""
    with open_source(str(folder)) as source:
        return np.concatenate([rows for _, _, rows in reference_logits(source, [IDS], num_threads=1)])


def bound(folder: Path) -> Binding:
    with open_source(str(folder)) as source:
        return bind(new_model(source.config()), source)


def theirs(folder: Path, kind: Any = AutoModelForCausalLM) -> np.ndarray[Any, Any]:
    """transformers' own."""
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return np.asarray(model(input_ids=torch.tensor([IDS])).logits[0].numpy())


def close(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> bool:
    return bool(np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max())


def parent(kind: str, path: Path) -> Path:
    """A tiny random multimodal model, saved."""
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(AutoConfig.for_model(kind, **PARENTS[kind]))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            spread = 0.7 * noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else parameter + 0.2 * noise
            parameter.copy_(spread)
    model.save_pretrained(path / kind)
    return path / kind


def rename(folder: Path, change: Callable[[str], str]) -> None:
    path = folder / "model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})


def restate(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


# ---- multimodal parents


@pytest.mark.parametrize("kind", PARENTS)
def test_the_language_model_of_a_parent(kind: str, tmp_path: Path) -> None:
    """Text alone gives the parent's own logits (llama4's forward fails without images: its text model's)."""
    folder = parent(kind, tmp_path)
    with open_source(str(folder)) as source:
        config = source.config()
        assert source.parent_type == kind
        assert config.architectures == [type(new_model(config)).__name__]
        assert config.vocab_size == 301
        unused = bind(new_model(config), source).unused
    assert unused
    assert not any("layers.1.self_attn" in name and "vision" not in name for name in unused)
    kinds = AutoModelForCausalLM if kind == "llama4" else AutoModelForMultimodalLM
    assert close(logits(folder), theirs(folder, kinds))


LAYOUTS: dict[str, Callable[[str], str]] = {
    "language_model.model": lambda name: f"language_model.{name}",
    "model.language_model": lambda name: name.replace("model.", "model.language_model.", 1),
    "text_model": lambda name: f"text_model.{name}",
    "base under a name of its own": lambda name: name.replace("model.", "thinker.llm.", 1),
    "head beside": lambda name: name.replace("model.", "language_model.model.", 1),
    "base without its own name": lambda name: name.replace("model.", "language_model.", 1),
}


@pytest.mark.parametrize("arch", ["llama", "gemma2", "mixtral", "gpt2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_prefixes(layout: str, arch: str, tmp_path: Path) -> None:
    """The text model's own config, a parent's names: an untied head, a tied one, a tensor an expert, no `model.`."""
    folder = tiny(arch, tmp_path, tokenizer=False, **MOE.get(arch, {}))
    expected = logits(folder)
    change = LAYOUTS[layout]
    rename(folder, lambda name: change(name.replace("transformer.", "model.")))
    assert bound(folder).unused == []
    np.testing.assert_array_equal(logits(folder), expected)


def test_other_towers_do_not_mislead(tmp_path: Path) -> None:
    """A second embedding of the same shape, and norms that would fit the base model's names."""
    folder = tiny("llama", tmp_path, tokenizer=False)
    expected = logits(folder)
    rename(folder, lambda name: f"language_model.{name}")
    tensors = load_file(folder / "model.safetensors")
    embedding, norm = (tensors[f"language_model.model.{part}.weight"] for part in ("embed_tokens", "norm"))
    extra = {
        "audio.embed_tokens.weight": embedding + 1,
        "language_model.norm.weight": norm + 1,
        "norm.weight": norm + 2,
    }
    save_file(tensors | extra, folder / "model.safetensors", metadata={"format": "pt"})
    assert bound(folder).unused == sorted(extra)
    np.testing.assert_array_equal(logits(folder), expected)


def test_a_parent_with_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path, tokenizer=False)
    rename(folder, lambda name: f"language_model.{name}".replace("layers.1.mlp.up_proj", "layers.1.mlp.gone"))
    with pytest.raises(PlancError, match=r"lacks \d+ of the tensors that LlamaForCausalLM needs"):
        bound(folder)


# ---- configs of older versions


def old(config: dict[str, Any]) -> dict[str, Any]:
    """As transformers 4.3x wrote it: rope fields at the top, `type`, `torch_dtype`, no fields that came later."""
    rope = dict(config.pop("rope_parameters", {}))
    later = ("dtype", "layer_types", "attention_bias", "mlp_bias", "head_dim", "use_cache", "initializer_range")
    implied = config["hidden_size"] // config["num_attention_heads"]
    kept = {k: v for k, v in config.items() if k not in later or (k == "head_dim" and v != implied)}
    scaling = {"type": kind, **rope} if (kind := rope.pop("rope_type", "default")) != "default" else None
    top = {k: rope.pop(k) for k in ("rope_theta", "partial_rotary_factor") if k in rope}
    if scaling is not None:
        scaling = {"type": kind, **rope}
    return {**kept, **top, "rope_scaling": scaling, "torch_dtype": "bfloat16", "transformers_version": "4.33.1"}


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=5e5, **fields))


_FACTORS = [1.0 + i / 10 for i in range(8)]
OLD: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("llama", rope("default")),
    "linear": ("llama", rope("linear", factor=2.0)),
    "dynamic": ("llama", rope("dynamic", factor=2.0)),
    "yarn": ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama3": (
        "llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "longrope": (
        "phi3",
        rope("longrope", short_factor=_FACTORS, long_factor=_FACTORS, original_max_position_embeddings=128)
        | dict(original_max_position_embeddings=128),
    ),
    "partial": ("stablelm", rope("default", partial_rotary_factor=0.25)),
    "no window": ("mistral", rope("default") | dict(sliding_window=None)),
    "experts": ("mixtral", MOE["mixtral"] | rope("default")),
    "qwen3 experts": ("qwen3_moe", MOE["qwen3_moe"] | rope("default")),
    "groups": ("falcon", dict(num_kv_heads=2, new_decoder_architecture=True, bias=False) | rope("default")),
    "latent": ("deepseek_v3", MOE["deepseek_v3"] | rope("yarn", factor=4.0, original_max_position_embeddings=64)),
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
def test_a_config_of_transformers_4_is_the_same_model(name: str, tmp_path: Path) -> None:
    arch, fields = OLD[name]
    folder = tiny(arch, tmp_path, tokenizer=False, **fields)
    expected = logits(folder)
    restate(folder, old)
    assert "rope_parameters" not in (folder / "config.json").read_text()
    np.testing.assert_array_equal(logits(folder), expected)
    assert close(expected, theirs(folder))


def test_two_bases_of_gemma3_survive(tmp_path: Path) -> None:
    """`sliding_window_pattern` and `rope_local_base_freq`, which became layer_types and a table a kind of layer."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    tables = {
        "sliding_attention": dict(rope_type="default", rope_theta=1e4),
        "full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1e6),
    }
    folder = tiny(
        "gemma3_text", tmp_path, tokenizer=False, num_hidden_layers=4, layer_types=kinds, rope_parameters=tables
    )
    expected = logits(folder)
    top = dict(rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=dict(rope_type="linear", factor=8.0))
    restate(folder, lambda c: {k: v for k, v in c.items() if k not in ("rope_parameters", "layer_types")} | top)
    restate(folder, lambda c: c | dict(sliding_window_pattern=3))
    np.testing.assert_array_equal(logits(folder), expected)
    restate(folder, lambda c: c | dict(rope_scaling=dict(type="linear", factor=8.0)))
    with pytest.raises(PlancError, match="rotary scaling of type linear, which transformers does not read"):
        logits(folder)


def test_a_rotary_base_that_transformers_drops_is_refused(tmp_path: Path) -> None:
    """dbrx states it in attn_config, where transformers 5 does not look."""
    folder = tiny("dbrx", tmp_path, tokenizer=False, **MOE["dbrx"])
    expected = logits(folder)

    def nested(config: dict[str, Any]) -> dict[str, Any]:
        return config | {"attn_config": config["attn_config"] | {"rope_theta": 5e5}}

    restate(folder, lambda c: {k: v for k, v in nested(c).items() if k != "rope_parameters"})
    with pytest.raises(PlancError, match=r"rope_theta 500000, which transformers does not read for a dbrx model"):
        logits(folder)
    restate(folder, lambda c: nested(c) | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    assert not close(logits(folder), expected)
