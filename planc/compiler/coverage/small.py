"""Small configs: in goes a model type, out comes a config of it that runs in milliseconds and keeps what is particular.

Sizes come from what a field's name says, layers from the lists that describe them one by one: the first of each kind
stays. `data/small.json` holds, per type, the fields for which that is not enough.
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

OVERRIDES = Path(__file__).parents[1] / "data" / "small.json"
VOCAB = 331
POSITIONS = 256
WINDOW = 5
CHUNK = 6
HIDDEN = 96
HEADS = 4
GROUPS = 2
MOST_LAYERS = 8
OWN = "own"  # leaves a field to the config's class
SHORT = 64  # what a config stretched by rotary scaling was "trained" with

# What a field's name means -> its value. The first pattern that fits the whole name counts.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(unpadded_|output_)?vocab_size(_per_layer_input)?", VOCAB),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|model_max_length", POSITIONS),
    (r"original_max_position_embeddings", SHORT),
    (r"(sliding_|attention_|keep_)?window(_size)?|sliding_window_size|local_attention", WINDOW),
    (r"attention_chunk_size", CHUNK),
    (r"pad_token_id", 0),
    (r"bos_token_id|decoder_start_token_id", 1),
    (r"eos_token_id", 2),
    (r"\w+_token_(id|index)", 3),
    (r"hidden_size|n_embd|d_model|emb_dim|embedding_(dim|size)|word_embed_proj_dim|lru_width", HIDDEN),
    (r"(swa_)?(n|num|num_attention|attention)_heads?", HEADS),
    (r"(swa_)?num_(key_value|kv)_heads|num_query_groups", GROUPS),
    (r"(swa_)?head_dim|kv_channels|dim_head", HIDDEN // HEADS),
    (r"(num_(hidden_)?|n_)layers?|num_layers_per_stack", 2),
    (r"(n_routed|num(_local)?|moe_num)_experts", 4),
    (r"(num_experts_per_tok(en)?|moe_(top)?_?k|top_k_experts)", 2),
    (r"n_group|num_expert_group", 2),
    (r"topk_group", 1),
    (r"(n|num|moe_num)_shared_experts?", 1),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"\w*(moe|expert)\w*_(intermediate|ffn_hidden)_size", 40),
    (r"(\w+_)?(intermediate_size(_mlp)?|ffn_(dim|hidden_size)|n_inner|dff|dim_ff)", 112),
    (r"rotary_dim", 12),
    (r"(linear_num_(value_)?|(n_)?mamba_(n_|num_)?)heads|n_mamba_heads", 4),
    (r"linear_num_key_heads|(mamba_)?n_?groups|mamba_ngroups", 2),
    (r"linear_(key_|value_)?head_dim|mamba_d_(head|state)|(ssm_)?state_size|mamba_head_?dim", 16),
    (r"(mamba_)?chunk_size", 8),
    (r"kv_lora_rank", 20),
    (r"\w+_lora_rank|q_lora_rank", 28),
    (r"qk_nope_head_dim|index_head_dim", 16),
    (r"qk_rope_head_dim", 8),
    (r"v_head_dim", 12),
    (r"index_n_heads", 2),
    (r"index_topk|index_block_size|rel_extent", 8),
    (r"index_topk_blocks", 2),
    (r"floor_scale|log_scaling_n_floor", 16),
    (r"hidden_size_per_layer_input", 8),
)
_AT_MOST = ("n_group", "num_expert_group", "topk_group", "num_experts_per_tok")  # a config with fewer keeps its own
# Numbers that would change little, or nothing, where they stand: what a name means -> a value that shows.
_NUMBERS: tuple[tuple[str, float], ...] = (
    (r"\w*soft_?cap(ping)?", 3.0),
    (r"\w*limit", 0.8),
    (r"(\w+_)?eps(ilon)?", 3e-3),
)
_NEUTRAL = re.compile(r"\w+_(multiplier|scaling|scale|scaling_factor)|route_scale|\w+_(alpha|beta)_factor")
_WHOLE = re.compile(r"\w+_multiplier")  # an int of such a name counts channels
_INSTEAD_OF_ONE = 0.7


def small(model_type: str, **fields: Any) -> PretrainedConfig:
    """The small config of a type; `fields` go over all else. Raises what the config's own check raises."""
    kind = CONFIG_MAPPING[model_type]
    chosen = _over(kind, _fields(kind), overrides().get(model_type, {})) | fields
    made = kind(**{name: value for name, value in chosen.items() if value != OWN})
    assert isinstance(made, PretrainedConfig)
    return made


@lru_cache(maxsize=1)
def overrides() -> Mapping[str, dict[str, Any]]:
    """Fields by model type, over what the rules say."""
    table: dict[str, dict[str, Any]] = json.loads(OVERRIDES.read_text())
    return table


def _over(kind: type[PretrainedConfig], fields: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`more` over `fields`; what it says of a config within the config goes over that config's fields."""
    parts = {name: {**fields.get(name, {}), **more[name]} for name in more if name in kind.sub_configs}
    return {**fields, **more, **parts}


def _fields(kind: type[PretrainedConfig]) -> dict[str, Any]:
    """What the rules say of a config's class, configs within it included."""
    try:
        base: dict[str, Any] = kind().to_dict()
    except Exception:  # noqa: BLE001 - some classes refuse their own defaults; the overrides then say it all
        base = {}
    base = _own(kind, base)
    return _by_name(base) | _parts(kind, base)


def _own(kind: type[PretrainedConfig], base: Mapping[str, Any]) -> dict[str, Any]:
    """The fields under their own names, without those that only stand for them."""
    return {name: value for name, value in base.items() if name not in kind.attribute_map}


def _by_name(base: Mapping[str, Any]) -> dict[str, Any]:
    return _sizes(base) | _heads(base) | _layers(base) | _rotary(base)


def resized(config: PretrainedConfig) -> PretrainedConfig:
    """A small copy of a config, by the same rules: each kind of layer stays, and how query heads share keys.

    Raises what the config's own check raises where fields no longer fit each other.
    """
    kind = type(config)
    base = _own(kind, config.to_dict())
    chosen = _by_name(base) | _sharing(config)
    derived = {name for name, value in chosen.items() if value == OWN}
    table = {name: value for name, value in {**base, **chosen}.items() if name not in derived}
    table.pop("quantization_config", None)
    made = kind.from_dict(table)
    assert isinstance(made, PretrainedConfig)
    return made


def _sharing(config: PretrainedConfig) -> dict[str, Any]:
    """As many groups of keys as the config has in kind: one, some, or one for each head."""
    heads, groups = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if not isinstance(heads, int) or not isinstance(groups, int):
        return {}
    name = config.attribute_map.get("num_key_value_heads", "num_key_value_heads")
    return {name: 1 if groups == 1 else HEADS if groups == heads else GROUPS}


def _sizes(base: Mapping[str, Any]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for name, value in base.items():
        size = _size(name)
        if isinstance(value, bool):
            continue
        if isinstance(value, int | float) and (number := _number(name, value)) is not None:
            chosen[name] = number
        elif size is None:
            continue
        elif isinstance(value, int):
            chosen[name] = min(size, value) if name in _AT_MOST or value == 0 else size
        elif value is None if name == "head_dim" else isinstance(value, list) and name.endswith("_token_id"):
            chosen[name] = size
    return chosen


def _size(name: str) -> int | None:
    return next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)


def _number(name: str, value: float) -> float | None:
    if value == 1 and _NEUTRAL.fullmatch(name) and not (isinstance(value, int) and _WHOLE.fullmatch(name)):
        return _INSTEAD_OF_ONE
    return next((number for pattern, number in _NUMBERS if value and re.fullmatch(pattern, name)), None)


def _heads(base: Mapping[str, Any]) -> dict[str, Any]:
    """Latent attention has a key for each head; the size of a key follows from its parts, and rotary has its own."""
    if base.get("kv_lora_rank") is None:
        return {}
    rotated = {"head_dim": _size("qk_rope_head_dim")} if base.get("head_dim") else {}
    return {"num_key_value_heads": HEADS, "qk_head_dim": OWN} | rotated


def _layers(base: Mapping[str, Any]) -> dict[str, Any]:
    """The first layer of each kind, at least two; a kind is what the lists with an entry a layer say of it."""
    name = next((n for n in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if base.get(n)), "")
    count = int(base.get(name, 0))
    lists = {k: v for k, v in base.items() if isinstance(v, list) and len(v) == count and _per_layer(v)}
    if not lists:
        return {}
    kinds: dict[str, int] = {}
    for i in range(count):
        kinds.setdefault(repr([v[i] for v in lists.values()]), i)
    chosen = sorted(kinds.values())[:MOST_LAYERS]
    if len(chosen) < 2:
        chosen = [0, 1]
    return {k: [v[i] for i in chosen] for k, v in lists.items()} | {name: len(chosen)}


def _per_layer(values: list[Any]) -> bool:
    """False for a list of layers' numbers, which may happen to be as long as there are layers."""
    return values != list(range(len(values)))


def _rotary(base: Mapping[str, Any]) -> dict[str, Any]:
    given = base.get("rope_parameters")
    return {"rope_parameters": _shortened(given)} if given else {}


def _shortened(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The same scaling for a model trained on few tokens, so that a short prompt reaches beyond them."""
    sizes = {"original_max_position_embeddings": SHORT, "max_position_embeddings": POSITIONS}
    made: dict[str, Any] = {}
    for name, value in parameters.items():
        made[name] = _shortened(value) if isinstance(value, dict) else sizes.get(name, value)
    return made


def _parts(kind: type[PretrainedConfig], base: Mapping[str, Any]) -> dict[str, Any]:
    """The small configs of the parts that the config's defaults have."""
    made: dict[str, Any] = {}
    for name, part in kind.sub_configs.items():
        if not isinstance(given := base.get(name), dict):
            continue
        if model_type := given.get("model_type"):
            made[name] = {**_plain(small(model_type)), "model_type": model_type}
        else:
            made[name] = _fields(part)
    return made


def _plain(config: PretrainedConfig) -> dict[str, Any]:
    table: dict[str, Any] = config.to_dict()
    return table
