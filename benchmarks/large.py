"""What does the code of a large model take? `planc build --weights none` on the shapes of Llama 70B and DeepSeek V3.

The checkpoints are sparse files: right headers, no bytes on the disk. Prints seconds and peak RSS, one row a shape.

    python -m benchmarks.large            # both
    python -m benchmarks.large llama-70b
"""

import argparse
import json
import struct
import tempfile
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.build_memory import write_tokenizer
from benchmarks.common import build, peak_rss_of_children, row

BOUNDS = {"llama-70b": (180, 2.0), "deepseek-v3": (360, 3.0)}  # seconds, GB
LLAMA: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=8192, intermediate_size=28672,
    num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, vocab_size=128256,
    max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False,
)  # fmt: skip
DEEPSEEK: dict[str, Any] = dict(
    architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", hidden_size=7168, intermediate_size=18432,
    moe_intermediate_size=2048, num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128,
    n_shared_experts=1, n_routed_experts=256, routed_scaling_factor=2.5, kv_lora_rank=512, q_lora_rank=1536,
    qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=128, n_group=8, topk_group=4, num_experts_per_tok=8,
    first_k_dense_replace=3, norm_topk_prob=True, vocab_size=129280, max_position_embeddings=163840,
    rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=False, hidden_act="silu",
    rope_scaling=dict(
        type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0,
        mscale_all_dim=1.0,
    ),
)  # fmt: skip
SHAPES = {"llama-70b": LLAMA, "deepseek-v3": DEEPSEEK}


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the checkpoint as it is published: one tensor an expert."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        yield from _attention(f"{at}.self_attn", config)
        if i >= config.get("first_k_dense_replace", 1 << 30):
            yield from _experts(f"{at}.mlp", config)
        else:
            yield from _mlp(f"{at}.mlp", hidden, config["intermediate_size"])


def _mlp(at: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}.gate_proj.weight", (inner, hidden)
    yield f"{at}.up_proj.weight", (inner, hidden)
    yield f"{at}.down_proj.weight", (hidden, inner)


def _experts(at: str, c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}.gate.weight", (c["n_routed_experts"], c["hidden_size"])
    yield f"{at}.gate.e_score_correction_bias", (c["n_routed_experts"],)
    for e in range(c["n_routed_experts"]):
        yield from _mlp(f"{at}.experts.{e}", c["hidden_size"], c["moe_intermediate_size"])
    yield from _mlp(f"{at}.shared_experts", c["hidden_size"], c["moe_intermediate_size"] * c["n_shared_experts"])


def _attention(at: str, c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    if "kv_lora_rank" not in c:
        kv = hidden // heads * c["num_key_value_heads"]
        shapes = {
            "q_proj": (hidden, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, hidden),
        }
    else:
        key = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
        yield f"{at}.q_a_layernorm.weight", (c["q_lora_rank"],)
        yield f"{at}.kv_a_layernorm.weight", (c["kv_lora_rank"],)
        shapes = {
            "q_a_proj": (c["q_lora_rank"], hidden),
            "q_b_proj": (heads * key, c["q_lora_rank"]),
            "kv_a_proj_with_mqa": (c["kv_lora_rank"] + c["qk_rope_head_dim"], hidden),
            "kv_b_proj": (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), c["kv_lora_rank"]),
            "o_proj": (hidden, heads * c["v_head_dim"]),
        }
    for name, shape in shapes.items():
        yield f"{at}.{name}.weight", shape


def generate(folder: Path, config: dict[str, Any]) -> int:
    """Writes config, tokenizer and one sparse safetensors file; returns the parameters."""
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    write_tokenizer(folder)
    header: dict[str, Any] = {}
    at = 0
    for name, shape in tensors(config):
        dtype, size = ("F32", 4) if name.endswith("correction_bias") else ("BF16", 2)
        end = at + prod(shape) * size
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return at // 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), help=f"of {', '.join(SHAPES)}")
    for name in parser.parse_args().shapes:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / name
            folder.mkdir()
            parameters = generate(folder, SHAPES[name])
            flags = ("--weights", "none", "--max-model-len", "4096", "--target", "cpu:x86-64-v3")
            seconds = build(str(folder), Path(scratch) / "plan", *flags)
        bound = BOUNDS[name]
        row(
            benchmark="large", shape=name, parameters=parameters, seconds=seconds,
            peak_rss_gb=peak_rss_of_children() / 1e9, bound_seconds=bound[0], bound_gb=bound[1],
        )  # fmt: skip


if __name__ == "__main__":
    main()
