"""A tiny Hugging Face model folder becomes a GGUF file, by llama.cpp's conventions (permuted q and k, gemma norms plus
one).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

# Hugging Face name -> GGUF name; {} is the layer.
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "input_layernorm.weight": "attn_norm.weight",
}
_NORMS = {
    "llama": {"post_attention_layernorm.weight": "ffn_norm.weight"},
    "qwen2": {"post_attention_layernorm.weight": "ffn_norm.weight"},
    "gemma2": {
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "pre_feedforward_layernorm.weight": "ffn_norm.weight",
        "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    },
}
_MERGES = [pair.split() for pair in ("Ġ t", "h e", "i n", "r e", "Ġt he", "Ġ a", "o n", "e r", "in g")]
PLAIN = gguf.GGMLQuantizationType.F32


def write(
    folder: Path,
    path: Path,
    kind: gguf.GGMLQuantizationType = PLAIN,
    *,
    extra: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    pre: str = "smollm",
) -> dict[str, np.ndarray[Any, Any]]:
    """Writes the model of `folder` to `path`, matrices as `kind`, and returns what each Hugging Face tensor should read
    as.

    `extra` adds metadata (str, int or float values), `tensors` adds float32 tensors by GGUF name.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    _metadata(writer, arch, config)
    _vocabulary(writer, config["vocab_size"], pre)
    for key, value in (extra or {}).items():
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](key, value)
    expected = {}
    for name, weights in sorted(load_file(folder / "model.safetensors").items()):
        expected[name] = _add(writer, arch, config, name, weights, kind)
    for name, weights in (tensors or {}).items():
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


_EXPERTS = {
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}


def write_experts(
    folder: Path, path: Path, state: dict[str, np.ndarray[Any, Any]], kind: gguf.GGMLQuantizationType
) -> None:
    """Writes the qwen3_moe model of `folder`, whose parameters are `state`, with its stacks of experts as `kind`."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "qwen3moe")
    _metadata(writer, "llama", config)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_expert_count(config.get("num_experts", config.get("num_local_experts")))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    _vocabulary(writer, config["vocab_size"], "qwen2")
    for name, weights in state.items():
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        if rest == "mlp.experts.gate_up_proj":
            for half, part in zip(("gate", "up"), np.split(weights, 2, axis=1), strict=True):
                _add_stack(writer, f"blk.{layer}.ffn_{half}_exps.weight", part, kind)
        elif rest == "mlp.experts.down_proj":
            _add_stack(writer, f"blk.{layer}.{_EXPERTS[rest]}", weights, kind)
        else:
            writer.add_tensor(_NAMES.get(name) or f"blk.{layer}.{({**_LAYER, **_EXPERTS})[rest]}", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_stack(writer: Any, name: str, weights: np.ndarray[Any, Any], kind: Any) -> None:
    weights = np.ascontiguousarray(weights)
    if kind == PLAIN:
        writer.add_tensor(name, weights)
    else:
        writer.add_tensor(name, gguf.quantize(weights, kind), raw_dtype=kind)


def _add(writer: Any, arch: str, config: dict[str, Any], name: str, weights: Any, kind: Any) -> Any:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    stored = weights
    for part, count in heads.items():
        if arch == "llama" and f".{part}." in name:
            stored = permute(weights, count)
    if arch == "gemma2" and "norm" in name:
        stored = weights + np.float32(1)
    if weights.ndim == 1 or kind == PLAIN:
        writer.add_tensor(gguf_name(arch, name), stored)
        return stored - np.float32(1) if stored is not weights and weights.ndim == 1 else weights
    data = gguf.quantize(np.ascontiguousarray(stored), kind)
    writer.add_tensor(gguf_name(arch, name), data, raw_dtype=kind)
    back = gguf.dequantize(data, kind)
    return unpermute(back, stored, weights) if stored is not weights else back


def permute(weights: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's conversion of q and k: halves of a head become interleaved pairs."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weights.shape)


def unpermute(array: Any, stored: Any, weights: Any) -> Any:
    """Rows of `array` in the order of `weights`, given that `stored` is `weights` permuted."""
    order = [int(np.flatnonzero((stored == row).all(axis=1))[0]) for row in weights]
    return array[order]


def gguf_name(arch: str, name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{({**_LAYER, **_NORMS[arch]})[rest]}"


def _metadata(writer: Any, arch: str, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if arch == "gemma2":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        writer.add_sliding_window(config["sliding_window"])
    else:
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
        writer.add_rope_dimension_count(
            config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        )


def _vocabulary(writer: Any, size: int, pre: str) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    pieces = ["<pad>", "<bos>", "<eos>", *sorted(ByteLevel.alphabet()), *(left + right for left, right in _MERGES)]
    tokens = [*pieces, *(f"<unused{i}>" for i in range(size - len(pieces)))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in _MERGES])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
