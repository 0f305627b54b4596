"""An architecture's name becomes a folder with a tiny seeded random model (safetensors) and a small real tokenizer.

    folder = tiny("qwen2", tmp_path, num_hidden_layers=3)

Every parameter is non-trivial, norms and biases too, so that a dropped bias or a skipped norm changes the logits. Sizes
are not multiples of 64, so that padding is exercised.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

VOCAB = 330
WINDOW = 5  # sliding windows are shorter than any useful prompt
ARCHS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox")

_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_GPT2: dict[str, Any] = dict(
    vocab_size=VOCAB,
    n_embd=64,
    n_layer=2,
    n_head=4,
    n_positions=256,
    n_inner=96,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
_SLIDING_FULL = ["sliding_attention", "full_attention"]
_EXTRA: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": dict(sliding_window=WINDOW),
    "qwen2": {},
    "qwen3": dict(head_dim=16),
    "gemma2": dict(
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=2.0,
        layer_types=_SLIDING_FULL,
    ),
    "gemma3_text": dict(head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=24, layer_types=_SLIDING_FULL),
    "phi3": dict(original_max_position_embeddings=256, embd_pdrop=0.0, resid_pdrop=0.0, attention_dropout=0.0),
    "gpt2": _GPT2,
    "gpt_neox": dict(rotary_pct=0.25, use_parallel_residual=True, hidden_dropout=0.0, attention_dropout=0.0),
}


def tiny(
    arch: str,
    path: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    tokenizer: bool = True,
    chat_template: bool = True,
    **overrides: Any,
) -> Path:
    """Write a tiny random model of `arch` (a transformers model type) below `path` and return its folder.

    `dtype` is a torch dtype's name, the storage type of the weights; `max_shard_size` as in save_pretrained ("20KB"
    makes shards); `overrides` are config fields. The same arguments give the same bytes.
    """
    import torch

    folder = path / f"{arch}-{seed}"
    model = random_model(config_of(arch, **overrides), seed)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)  # type: ignore[attr-defined]
    if tokenizer:
        from planc.compiler.coverage.tokenizer import small_tokenizer

        small_tokenizer(chat_template=chat_template).save_pretrained(folder)
    return folder


def config_of(arch: str, **overrides: Any) -> PretrainedConfig:
    """The tiny config of a model type; an arch without a row takes the small config that coverage checks it by."""
    from transformers import AutoConfig

    from planc.compiler.coverage.small import small

    if arch not in _EXTRA:
        return small(arch, **overrides)
    fields = dict(_EXTRA[arch]) if arch == "gpt2" else {**_COMMON, **_EXTRA[arch]}
    return AutoConfig.for_model(arch, **{**fields, **overrides})


def random_model(config: PretrainedConfig, seed: int = 0) -> nn.Module:
    """A float32 causal language model in eval mode whose every parameter is random: matrices keep unit gain, vectors
    vary by 0.2.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_spread(name, parameter, noise))
    return model


def _spread(name: str, parameter: Any, noise: Any) -> Any:
    """Scale noise to the parameter's kind; vectors keep their initial value (0 or 1) as the mean."""
    if parameter.ndim < 2:
        return parameter + 0.2 * noise
    if "embed" in name or "wte" in name or "wpe" in name:
        return 0.5 * noise
    return noise * parameter.shape[-1] ** -0.5
