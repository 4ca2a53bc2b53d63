"""Qwen3-MoE: the attention of Qwen3, and experts in every layer (arXiv 2505.09388, section 2)."""

from __future__ import annotations

from asyncrl.training.megatron.table import ATTENTION, EXPERTS, QK_NORMS, Family

FAMILY = Family(
    "Qwen3MoeForCausalLM",
    layer={**ATTENTION, **QK_NORMS, **EXPERTS},
    options={"qk_layernorm": True},
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
)
