"""Configs of a type unlike its small one: in goes a model type, out comes a hypothesis strategy of fields to change.

What can change is read off the small config's own fields. Every choice shrinks towards the small config, and only what
differs from it is in the result, so that the smallest failing example names what matters.
"""

import re
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from transformers import PretrainedConfig

from planc.compiler.coverage.small import small

FLAGS = re.compile(
    r"tie_word_embeddings|\w*bias|no_bias|use_parallel_residual|parallel_attn|alibi|multi_query|use_qk_norm"
    r"|new_decoder_architecture|\w*qk_layernorm|norm_topk_prob|scale_attn_\w+|do_layer_norm_before|scale_embedding"
    r"|use_post_norm|apply_residual_connection_post_layernorm|rope_interleave|use_sandwich_norm|enable_moe_block"
    r"|attention_k_eq_v|use_double_wide_mlp"
)
NOT_FLAGS = re.compile(r"classifier_bias|use_expert_bias")
HEADS = ((4, 2), (4, 4), (4, 1), (6, 3), (2, 1))  # with the heads of keys and values
HEAD_DIMS = (24, 16, 20, 40)
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
FUNCTIONS = ("gelu", "gelu_pytorch_tanh", "relu", "silu", "relu2")
VOCABS = (331, 301, 277, 512)
WINDOWS = (5, 3, 17, 300)  # shorter and longer than the prompt
CHUNKS = (6, 16, 256)
PER_LAYER_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "layer_rope_theta")

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@st.composite
def fields_of(draw: st.DrawFn, model_type: str) -> dict[str, Any]:
    """Fields of the type's config to change, by the names that the config itself uses."""
    base = small(model_type)
    table = {name: value for name, value in base.to_dict().items() if name not in base.attribute_map}
    made: dict[str, Any] = {}
    for part in (_flags, _functions, _vocab, _windows, _heads, _layers):
        made |= part(draw, base, table)
    made |= _rotary(draw, table, {**table, **made})
    return {name: value for name, value in made.items() if table.get(name) != value}


def _flags(draw: st.DrawFn, base: PretrainedConfig, table: Mapping[str, Any]) -> dict[str, Any]:
    names = [n for n, v in table.items() if isinstance(v, bool) and FLAGS.fullmatch(n) and not NOT_FLAGS.fullmatch(n)]
    return {name: draw(st.sampled_from((table[name], not table[name])), label=name) for name in names}


def _functions(draw: st.DrawFn, base: PretrainedConfig, table: Mapping[str, Any]) -> dict[str, Any]:
    names = [n for n in ACTIVATIONS if table.get(n) in FUNCTIONS]
    return {n: draw(st.sampled_from((table[n], *FUNCTIONS)), label=n) for n in names}


def _vocab(draw: st.DrawFn, base: PretrainedConfig, table: Mapping[str, Any]) -> dict[str, Any]:
    if "vocab_size" not in table or "vocab_size_per_layer_input" in table:
        return {}
    return {"vocab_size": draw(st.sampled_from(VOCABS), label="vocab_size")}


def _windows(draw: st.DrawFn, base: PretrainedConfig, table: Mapping[str, Any]) -> dict[str, Any]:
    names = {n: WINDOWS for n in ("sliding_window", "window_size", "sliding_window_size")}
    names["attention_chunk_size"] = CHUNKS
    return {n: draw(st.sampled_from(v), label=n) for n, v in names.items() if isinstance(table.get(n), int)}


def _heads(draw: st.DrawFn, base: PretrainedConfig, table: Mapping[str, Any]) -> dict[str, Any]:
    """Heads, their groups and their size; a head's size that the config does not hold is hidden / heads."""
    heads, groups = (base.attribute_map.get(n, n) for n in ("num_attention_heads", "num_key_value_heads"))
    hidden = base.attribute_map.get("hidden_size", "hidden_size")
    fixed = table.get("kv_lora_rank") or "num_attention_heads_per_layer" in table or base.sub_configs
    if fixed or not isinstance(table.get(heads), int):
        return {}
    count, grouped = draw(st.sampled_from(HEADS), label="heads")
    size = draw(st.sampled_from(HEAD_DIMS), label="head size")
    made = {heads: count}
    for name in (groups, "num_kv_heads"):
        if isinstance(table.get(name), int):
            made[name] = grouped
    if isinstance(table.get("head_dim"), int):
        made["head_dim"] = size
    elif isinstance(table.get(hidden), int):
        made[hidden] = count * size
    return made


def _layers(draw: st.DrawFn, base: PretrainedConfig, table: Mapping[str, Any]) -> dict[str, Any]:
    """One to four of the small config's layers, in any order and number."""
    count = int(getattr(base, "num_hidden_layers", 0))
    lists = {n: table[n] for n in PER_LAYER_LISTS if isinstance(table.get(n), list) and len(table[n]) == count}
    name = base.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if not lists:
        return {}
    usual = list(range(count))
    others = st.lists(st.integers(0, count - 1), min_size=1, max_size=4)
    chosen = draw(st.one_of(st.just(usual), others), label="layers")
    return {n: [v[i] for i in chosen] for n, v in lists.items()} | {name: len(chosen)}


def _rotary(draw: st.DrawFn, table: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    given = table.get("rope_parameters")
    if not isinstance(given, dict) or not given:
        return {}
    return {"rope_parameters": _rotations(draw, given, changed)}


def _rotations(draw: st.DrawFn, given: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Other rotations than the given ones, for each kind of layer where they differ by kind."""
    if "rope_type" not in given:
        return {k: _rotations(draw, v, table) if isinstance(v, dict) else v for k, v in given.items()}
    kept = {k: given[k] for k in ("rope_theta", "partial_rotary_factor") if k in given}
    if "partial_rotary_factor" in kept:
        factors = (kept["partial_rotary_factor"], 0.5, 1.0)
        kept["partial_rotary_factor"] = draw(st.sampled_from(factors), label="partial factor")
    head = table.get("qk_rope_head_dim") or table.get("head_dim") or _head_dim(table)
    pairs = int(head * kept.get("partial_rotary_factor", 1.0)) // 2 if head else 0
    return draw(st.sampled_from(_choices(dict(given), kept, pairs)), label="rotation")


def _choices(given: dict[str, Any], kept: dict[str, Any], pairs: int) -> list[dict[str, Any]]:
    long = {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.05 * i for i in range(pairs)],
        "long_factor": [2.0 + 0.3 * i for i in range(pairs)],
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    plain = {"rope_type": "default"}
    some = [plain, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}, _YARN, _LLAMA3]
    return [given | kept, *(kept | other for other in [*some, *([long] if pairs else [])])]


def _head_dim(table: Mapping[str, Any]) -> int:
    hidden, heads = table.get("hidden_size"), table.get("num_attention_heads")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) else 0
