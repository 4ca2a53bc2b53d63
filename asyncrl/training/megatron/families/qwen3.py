"""Qwen3, dense: queries and keys are normalised per head before the rotation (arXiv 2505.09388, section 2)."""

from __future__ import annotations

from asyncrl.training.megatron.table import DENSE_LAYER, QK_NORMS, Family

FAMILY = Family(
    "Qwen3ForCausalLM",
    layer={**DENSE_LAYER, **QK_NORMS},
    options={"qk_layernorm": True},
    fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
)
