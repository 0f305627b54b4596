"""The two hooks into transformers: attention and its mask become one custom op each while a model is being traced.

Both ops have a schema and a shape rule only: they are traced, never run. Nothing is registered with transformers
outside of `installed()`, and other attention implementations are never touched.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import AttentionInterface

from planc.compiler.refusal import refused

NAME = "planc"

_LIBRARY = torch.library.Library("planc", "DEF")
_LIBRARY.define("mask(SymInt queries, SymInt keys, str kind, int size, Device device) -> Tensor")
_LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor? bias, "
    "float scale, bool causal, int window, float softcap, int layer) -> Tensor"
)

# Keywords that change what a call reports or how it runs, never what it computes for one traced step without a cache.
BENIGN = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}
)


def _mask_shape(queries: int, keys: int, kind: str, size: int, device: torch.device) -> Tensor:
    return torch.empty((1, 1, queries, keys), dtype=torch.bool, device=device)


def _attention_shape(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    batch, heads, tokens, _ = q.shape
    return q.new_empty((batch, tokens, heads, v.shape[-1]))


torch.library.register_fake("planc::mask", _mask_shape, lib=_LIBRARY)
torch.library.register_fake("planc::attention", _attention_shape, lib=_LIBRARY)


@contextmanager
def installed(
    attention: Callable[..., Any] | None = None, mask: Callable[..., Any] | None = None, name: str = NAME
) -> Iterator[str]:
    """Registers the two hooks under `name` for the duration, and yields the name for `attn_implementation`."""
    for interface, hook in ((AttentionInterface, attention or attend), (AttentionMaskInterface, mask or mask_token)):
        if name in interface._global_mapping:
            raise RuntimeError(f"the attention implementation {name!r} is registered already")
        interface.register(name, hook)
    try:
        yield name
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
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
        scale,
        bool(causal),
        int(sliding_window or 0),
        float(softcap or 0.0),
        -1 if layer is None else int(layer),
    )
    return out, None


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
    if attention_mask is not None or q_offset or kv_offset:
        raise refused("attention mask: padding or an offset in a trace of one whole sequence")
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
