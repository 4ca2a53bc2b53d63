"""Qwen3-MoE: the attention of Qwen3, and experts in every layer (arXiv 2505.09388, section 2)."""

from __future__ import annotations

from asyncrl.training.megatron.weight_map import NORMS, Family, attention, mixture

FAMILY = Family(
    "Qwen3MoeForCausalLM",
    layer=lambda shape, number: {**NORMS, **attention(shape), **mixture(shape, number)},
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
)
