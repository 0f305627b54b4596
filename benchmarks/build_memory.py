"""How much memory does a build need? Builds a generated bf16 folder of the given size; prints peak RSS and seconds.

The bound is 1.5 GB plus the largest tensor in float32, whatever the model's size; 3 GB where the build calibrates and
holds activations.
"""

import argparse
import json
import tempfile
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

import planc
from benchmarks.common import build, peak_rss_of_children, row
from planc.compiler.calibrate.search import profiting
from planc.plans.tensors import Writer

HIDDEN, INTERMEDIATE, VOCAB, HEADS, KV_HEADS = 2048, 8192, 32000, 32, 8


def tensors(layers: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a llama-shaped checkpoint."""
    kv = HIDDEN // HEADS * KV_HEADS
    table = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    table["lm_head.weight"] = (VOCAB, HIDDEN)
    for i in range(layers):
        at = f"model.layers.{i}."
        table |= {f"{at}{n}_layernorm.weight": (HIDDEN,) for n in ("input", "post_attention")}
        table |= {f"{at}self_attn.{n}_proj.weight": (HIDDEN, HIDDEN) for n in "qo"}
        table |= {f"{at}self_attn.{n}_proj.weight": (kv, HIDDEN) for n in "kv"}
        table |= {f"{at}mlp.{n}_proj.weight": (INTERMEDIATE, HIDDEN) for n in ("gate", "up")}
        table[f"{at}mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    return table


def generate(folder: Path, gigabytes: float, shards: int = 3) -> dict[str, tuple[int, ...]]:
    """Writes the folder: config, tokenizer, and random bf16 weights in shards with an index."""
    per_layer = sum(prod(s) for n, s in tensors(1).items() if "layers.0." in n) * 2
    rest = sum(prod(s) for n, s in tensors(0).items()) * 2
    layers = max(1, round((gigabytes * 1e9 - rest) / per_layer))
    table = tensors(layers)
    names = list(table)
    weight_map = {}
    rng = np.random.default_rng(0)
    noise = (rng.standard_normal(1 << 22) * 0.02).astype(ml_dtypes.bfloat16)
    for s in range(shards):
        part, file = names[s::shards], f"model-{s + 1:05}-of-{shards:05}.safetensors"
        weight_map |= dict.fromkeys(part, file)
        header = [(n, "bf16", table[n], prod(table[n]) * 2) for n in part]
        with Writer(folder / file, header) as out:
            for n in part:
                out.write(n, np.resize(noise, table[n]))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_config(folder, layers)
    return table


def write_config(folder: Path, layers: int) -> None:
    """config.json of the generated model, and a tokenizer."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--reference", default="transformers")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        table = generate(folder, args.gigabytes)
        flags = ("--dtype", args.dtype, "--reference", args.reference, "--max-num-batched-tokens", "256")
        seconds = build(str(folder), Path(scratch) / "plan", *flags)
    size, largest = sum(prod(s) * 2 for s in table.values()), max(prod(s) * 4 for s in table.values())
    bound, peak = 3e9 if profiting(args.dtype) else 1.5e9 + largest, peak_rss_of_children()
    row(
        benchmark="build_memory", planc=planc.__version__, dtype=args.dtype, reference=args.reference,
        model_gb=size / 1e9, seconds=seconds, peak_rss_gb=peak / 1e9, bound_gb=bound / 1e9, within=peak <= bound,
    )  # fmt: skip


if __name__ == "__main__":
    main()
