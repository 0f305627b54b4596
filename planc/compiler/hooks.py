"""The hooks into transformers: attention, its mask and expert layers become custom ops while a model is being traced.

The ops have a schema and a shape rule only: they are traced, never run. Nothing is registered with transformers outside
of `installed()`, and other implementations are never touched.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import AttentionInterface

from planc.compiler.refusal import refused

NAME = "planc"

_LIBRARY = torch.library.Library("planc", "DEF")
_LIBRARY.define("mask(SymInt queries, SymInt keys, str kind, int size, Device device) -> Tensor")
_LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor? bias, Tensor? slopes, "
    "float scale, bool causal, int window, float softcap, int layer) -> Tensor"
)
_LIBRARY.define("expert_linear(Tensor x, Tensor ids, Tensor weight, Tensor? bias, bool transposed) -> Tensor")
_LIBRARY.define("weighted_sum(Tensor x, Tensor weights) -> Tensor")
_LIBRARY.define("by_position(Tensor positions, Tensor table) -> Tensor")

# Keywords that change what a call reports or how it runs, never what it computes for one traced step without a cache.
BENIGN = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}
    | {"logits_to_keep"}
)


def _mask_shape(queries: int, keys: int, kind: str, size: int, device: torch.device) -> Tensor:
    return torch.empty((1, 1, queries, keys), dtype=torch.bool, device=device)


def _attention_shape(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    batch, heads, tokens, _ = q.shape
    return q.new_empty((batch, tokens, heads, v.shape[-1]))


def _expert_shape(x: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    return x.new_empty((*ids.shape, weight.shape[2 if transposed else 1]))


def _sum_shape(x: Tensor, weights: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[2]))


def _table_shape(positions: Tensor, table: Tensor) -> Tensor:
    return positions.new_empty((*positions.shape, *table.shape[1:]), dtype=table.dtype)


for _op, _rule in (
    ("mask", _mask_shape),
    ("attention", _attention_shape),
    ("expert_linear", _expert_shape),
    ("weighted_sum", _sum_shape),
    ("by_position", _table_shape),
):
    torch.library.register_fake(f"planc::{_op}", _rule, lib=_LIBRARY)


@contextmanager
def installed(
    attention: Callable[..., Any] | None = None, mask: Callable[..., Any] | None = None, name: str = NAME
) -> Iterator[str]:
    """Registers the hooks under `name` for the duration, and yields the name of the attention and experts to set."""
    chosen = (
        (AttentionInterface, attention or attend),
        (AttentionMaskInterface, mask or mask_token),
        (ExpertsInterface, experts),
    )
    for interface, hook in chosen:
        if name in interface._global_mapping:
            raise RuntimeError(f"the implementation {name!r} is registered already")
        interface._global_mapping[name] = hook
    try:
        yield name
    finally:
        for interface, _ in chosen:
            interface._global_mapping.pop(name)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: q [B, Hq, T, D], k [B, Hk, T, D], v [B, Hk, T, Dv] give [B, T, Hq, Dv].

    Raises PlancError on any other keyword that is not None: dropping one in silence would change the model.
    """
    where = f"attention of {type(module).__name__} (layer {getattr(module, 'layer_idx', None)})"
    for keyword, given in others.items():
        if given is not None and keyword not in BENIGN:
            raise refused(f"{where}: keyword {keyword}={_short(given)} is not understood")
    if dropout:
        raise refused(f"{where}: dropout={dropout} in a model that should be in eval mode")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer = getattr(module, "layer_idx", None)
    out = torch.ops.planc.attention(
        query,
        key,
        value,
        attention_mask,
        s_aux if s_aux is not None else sinks,
        position_bias,
        None,
        scale,
        bool(causal),
        int(sliding_window or 0),
        float(softcap or 0.0),
        -1 if layer is None else int(layer),
    )
    return out, None


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts interface: x [N, D], chosen experts [N, k] and their weights [N, k] give [N, D].

    Two expert layers with the module's own gate between them, which is traced as it is written.
    """
    gated, biased, transposed = module.has_gate, module.has_bias, module.is_transposed
    name = "gate_up_proj" if gated else "up_proj"
    bias = getattr(module, f"{name}_bias") if biased else None
    x = torch.ops.planc.expert_linear(hidden_states, top_k_index, getattr(module, name), bias, transposed)
    x = module._apply_gate(x) if gated else module.act_fn(x)
    bias = module.down_proj_bias if biased else None
    x = torch.ops.planc.expert_linear(x, top_k_index, module.down_proj, bias, transposed)
    if module.has_post_expert_norm:
        x = module.post_expert_norm(x)
    out: Tensor = torch.ops.planc.weighted_sum(x, top_k_weights)
    return out.to(hidden_states.dtype)


def _short(given: object) -> str:
    return f"Tensor{tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)[:40]


def mask_token(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor:
    """transformers' mask interface: the kind and size of the mask as a token that each attention op then carries."""
    if q_offset or kv_offset:
        raise refused("attention mask: an offset in a trace of one whole sequence")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise refused(f"attention mask: the model gives one of its own, of shape {tuple(attention_mask.shape)}")
    kind, size = classify(mask_function)
    token: Tensor = torch.ops.planc.mask(q_length, kv_length, kind, size, torch.device(device))
    return token


def classify(mask_function: Callable[..., Any]) -> tuple[str, int]:
    """("causal", 0), ("sliding", window) or ("chunked", size) of a transformers mask function.

    Reads the closure variables of its parts. The packed-sequence part says that tokens of one sequence see each other,
    which holds for every step of ours. Raises PlancError for a part that is not known, bidirectional masks among them.
    """
    parts = list(_parts(mask_function))
    if "causal" not in [kind for kind, _ in parts]:
        raise refused(f"attention mask: {_name(mask_function)} is not causal")
    special = sorted({p for p in parts if p[0] in ("sliding", "chunked")})
    if len(special) > 1:
        raise refused(f"attention mask: {special[0]} and {special[1]} at once are not supported")
    return special[0] if special else ("causal", 0)


def _parts(fn: Callable[..., Any]) -> Iterator[tuple[str, int]]:
    if fn is causal_mask_function:
        yield "causal", 0
        return
    cells = _closure(fn)
    maker = _name(fn).split(".")[0]
    if maker == "and_masks" and set(cells) == {"mask_functions"}:
        for part in cells["mask_functions"]:
            yield from _parts(part)
    elif maker == "remap_positions_for_packed_sequence" and set(cells) == {"mask_function", "position_ids"}:
        yield from _parts(cells["mask_function"])
    elif set(cells) == {"packed_sequence_mask"}:
        yield "packed", 0
    elif set(cells) == {"sliding_window"} and _slides(fn, int(cells["sliding_window"])):
        yield "sliding", int(cells["sliding_window"])
    elif set(cells) == {"chunk_size", "left_padding"}:
        yield "chunked", int(cells["chunk_size"])
    else:
        raise refused(f"attention mask: {_name(fn)} with variables {sorted(cells)} is not understood")


def _slides(fn: Callable[..., Any], window: int) -> bool:
    """Whether `fn` is the one-sided window k > q - window, asked at the edges."""
    q = 2 * window
    return all(bool(fn(0, 0, q, k)) == (k > q - window) for k in (0, q - window, q - window + 1, q, q + window + 1))


def _closure(fn: Callable[..., Any]) -> Mapping[str, Any]:
    code = getattr(fn, "__code__", None)
    cells = getattr(fn, "__closure__", None) or ()
    return {n: c.cell_contents for n, c in zip(code.co_freevars, cells, strict=True)} if code else {}


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__)
