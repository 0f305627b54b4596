"""Small configs for the self-test: in goes a config, out come ever larger copies that keep every kind of layer."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from transformers import PretrainedConfig

from planc.compiler.coverage.small import resized

HEAD_DIM = 32
WINDOW = 5  # below any test prompt
VOCAB = 160
INNER = 80
_MAX_KINDS = 8

_STEPS = ((True, True, HEAD_DIM), (True, True, None), (False, True, HEAD_DIM), (True, False, None))
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_WINDOWS = ("sliding_window", "window_size")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def shrunk(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Copies of the config, the smallest first: by the rules of small configs; then by cautious ones, which leave more
    as it is: all; all but the head's size; all but the layers; layers alone.
    """
    with suppress(Exception):  # a config may refuse fields that do not fit each other
        yield resized(config)
    for layers, widths, head_dim in _STEPS:
        try:
            fields = _layers(config) if layers else {}
            fields |= _common(config) | (_widths(config, head_dim) if widths else {})
            made = _copy(config, fields)
        except Exception:  # noqa: BLE001 - a config may lack a field, or refuse fields that do not fit each other
            continue
        yield made


def _copy(config: PretrainedConfig, fields: dict[str, Any]) -> PretrainedConfig:
    names = getattr(type(config), "attribute_map", {}) or {}
    table = config.to_dict()
    for name, value in fields.items():
        name = names.get(name, name)
        if table.get(name) is not None:
            table[name] = value
    table.pop("quantization_config", None)
    made = type(config).from_dict(table)
    assert isinstance(made, PretrainedConfig)
    return made


def _layers(config: PretrainedConfig) -> dict[str, Any]:
    """The first layer of each kind, at least two layers; a kind is what the config's per-layer lists say of a layer."""
    count = int(config.num_hidden_layers)
    lists = {k: v for k, v in config.to_dict().items() if isinstance(v, list) and len(v) == count and count > 1}
    kinds: dict[str, int] = {}
    for i in range(count):
        kinds.setdefault(repr([v[i] for v in lists.values()]), i)
    chosen = sorted(kinds.values())[:_MAX_KINDS]
    spare = [i for i in range(count) if i not in chosen]
    chosen = sorted([*chosen, *spare[: max(0, 2 - len(chosen))]])
    return {k: [v[i] for i in chosen] for k, v in lists.items()} | {"num_hidden_layers": len(chosen)}


def _common(config: PretrainedConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {"vocab_size": min(VOCAB, int(config.vocab_size)), **_TOKENS}
    for name in _WINDOWS:
        if isinstance(size := getattr(config, name, None), int):
            fields[name] = min(size, WINDOW)
    return fields


def _widths(config: PretrainedConfig, head_dim: int | None) -> dict[str, Any]:
    """Few heads in the config's grouping, narrow layers; `head_dim` None keeps the head's size."""
    heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    old = int(getattr(config, "head_dim", None) or hidden // heads)
    size = old if head_dim is None else min(old, head_dim)
    few_groups = min(groups, 2)
    few = few_groups * min(max(heads // groups, 1), 2)
    width = few * size if heads * old == hidden else few * size + 2 * few
    fields = {"num_attention_heads": few, "num_key_value_heads": few_groups, "head_dim": size, "hidden_size": width}
    for name in _INNER:
        if isinstance(getattr(config, name, None), int):
            fields[name] = INNER
    if getattr(config, "word_embed_proj_dim", None) == hidden:
        fields["word_embed_proj_dim"] = width
    return fields
