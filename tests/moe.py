"""Tiny mixture-of-experts models: a model type becomes the config fields that `tests.models.tiny` needs for it."""

from __future__ import annotations

from typing import Any

_DEEPSEEK: dict[str, Any] = dict(
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=40,
    first_k_dense_replace=1,
    n_group=2,
    topk_group=1,
)
_MLA: dict[str, Any] = dict(
    num_key_value_heads=4, kv_lora_rank=20, q_lora_rank=28, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12
)
_LOCAL: dict[str, Any] = dict(num_local_experts=4, num_experts_per_tok=2)
_QWEN: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40, num_hidden_layers=3, mlp_only_layers=[0]
)
_FACTORS = [1.0 + i / 10 for i in range(12)]
MOE: dict[str, dict[str, Any]] = {
    "mixtral": _LOCAL,
    "qwen2_moe": _QWEN | dict(shared_expert_intermediate_size=48, decoder_sparse_step=1),
    "qwen3_moe": _QWEN | dict(head_dim=16, decoder_sparse_step=1),
    "deepseek_v3": _DEEPSEEK | _MLA,
    "gpt_oss": _LOCAL | dict(head_dim=16, sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    "olmoe": dict(num_experts=4, num_experts_per_tok=2),
    "phimoe": _LOCAL
    | dict(
        original_max_position_embeddings=128,
        rope_parameters=dict(
            rope_type="longrope", rope_theta=1e4, short_factor=_FACTORS, long_factor=_FACTORS, factor=2.0,
            short_mscale=1.2, long_mscale=1.3, original_max_position_embeddings=128,
        ),
    ),
    "granitemoe": _LOCAL,
    "hunyuan_v1_moe": dict(num_experts=4, moe_topk=2, num_shared_expert=1, head_dim=16),
    "ernie4_5_moe": dict(
        moe_num_experts=4, moe_k=2, moe_layer_start_index=1, moe_layer_end_index=1, moe_num_shared_experts=1,
        moe_intermediate_size=40,
    ),
    "minimax_m2": _LOCAL | dict(head_dim=16),
    "dots1": _DEEPSEEK | dict(n_group=1),
    "glm4_moe": _DEEPSEEK | dict(n_group=1, use_qk_norm=True),
    "jetmoe": _LOCAL | dict(kv_channels=16, num_key_value_heads=4),
    "dbrx": dict(
        d_model=64, n_heads=4, n_layers=2, max_seq_len=256,
        ffn_config=dict(ffn_hidden_size=96, moe_num_experts=4, moe_top_k=2, hidden_size=64),
        attn_config=dict(kv_n_heads=2, clip_qkv=0.5, rope_theta=10000.0),
    ),
}  # fmt: skip
