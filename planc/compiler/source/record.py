"""What a plan keeps of its model's config: in go configs, out come their JSON form and the first difference of two.

Keys that say where and by what a config was written are not kept. Those that cannot change what a step computes are
kept, and make no difference: token ids, the stored dtype, names of classes, what only training or generation reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planc.compiler.source.base import VOLATILE
from planc.errors import PlancError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

FILE = "config.json"

_NAMES = ("architectures", "auto_map", "dtype", "torch_dtype", "id2label", "label2id", "problem_type")
_CALLS = (
    "use_cache",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "chunk_size_feed_forward",
)
_TRAINING = ("initializer_range", "initializer_factor", "init_std", "gradient_checkpointing", "router_jitter_noise")
_GENERATION = ("do_sample", "max_length", "min_length", "max_new_tokens", "num_beams", "repetition_penalty")
_IGNORED = frozenset({*_NAMES, *_CALLS, *_TRAINING, *_GENERATION})
_ENDINGS = (
    "_token_id",
    "_token_ids",
    "_token_index",
    "dropout",
    "_pdrop",
    "dropout_prob",
    "dropout_rate",
    "layerdrop",
    "loss_coef",
)
_ABSENT = None  # a key that a config does not have; what is absent is what is null


def recorded(config: PretrainedConfig) -> dict[str, Any]:
    """The whole config, defaults included, without what differs between two copies of a model."""
    kept: dict[str, Any] = _stable(json.loads(config.to_json_string(use_diff=False)))
    return kept


def write(config: PretrainedConfig, root: Path) -> None:
    """Writes `config.json` below `root`: equal models give equal bytes."""
    text = json.dumps(recorded(config), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    (root / FILE).write_text(text, encoding="utf-8")


def read(root: Path) -> dict[str, Any]:
    """What `write` wrote below `root`; PlancError when there is none."""
    try:
        kept: dict[str, Any] = json.loads((root / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlancError(f"{root} has no {FILE}, which says what it was built for. Build the plan again.") from None
    return kept


def counting(model: PreTrainedModel) -> tuple[str, ...]:
    """Token ids that a step of the model does depend on: that of padding, where a table leaves out its row."""
    from transformers import PreTrainedModel

    words = model.get_input_embeddings()
    tables = (m for m in model.modules() if m is not words and not isinstance(m, PreTrainedModel))
    return ("pad_token_id",) if any(getattr(m, "padding_idx", None) is not None for m in tables) else ()


def first_difference(
    was: dict[str, Any], now: dict[str, Any], counting: tuple[str, ...] = ()
) -> tuple[str, Any, Any] | None:
    """The first key, its path joined by dots, that two records disagree on, and both values; the model's type goes
    first, the others by name. Token ids make no difference but for those in `counting`.
    """
    before, after = dict(_flat(was, counting)), dict(_flat(now, counting))
    for key in sorted(before.keys() | after.keys(), key=lambda k: (k != "model_type", k)):
        pair = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if pair[0] != pair[1]:
            return key, *pair
    return None


def _stable(value: Any) -> Any:
    """Without the volatile keys of a config and of those in it."""
    if isinstance(value, dict):
        return {k: _stable(v) for k, v in value.items() if k not in VOLATILE}
    return [_stable(v) for v in value] if isinstance(value, list) else value


def _flat(table: dict[str, Any], counting: tuple[str, ...], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """What may change a step, tables within tables under dotted names."""
    for key, value in table.items():
        if key in _IGNORED or (key.endswith(_ENDINGS) and key not in counting):
            continue
        if isinstance(value, dict):
            yield from _flat(value, counting, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
