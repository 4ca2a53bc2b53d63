"""Qwen2.5: queries, keys and values have biases (arXiv 2412.15115, section 2)."""

from __future__ import annotations

from asyncrl.training.megatron.table import DENSE_LAYER, Family, keys, queries, values

FAMILY = Family(
    "Qwen2ForCausalLM",
    layer={
        **DENSE_LAYER,
        "self_attn.q_proj.bias": queries("bias"),
        "self_attn.k_proj.bias": keys("bias"),
        "self_attn.v_proj.bias": values("bias"),
    },
    options={"add_qkv_bias": True},
    fixed={"hidden_act": "silu", "use_sliding_window": False},
)
