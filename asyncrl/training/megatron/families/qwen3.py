"""Qwen3, dense: queries and keys are normalised per head before the rotation (arXiv 2505.09388, section 2)."""

from __future__ import annotations

from asyncrl.training.megatron.weight_map import Family

FAMILY = Family(
    "Qwen3ForCausalLM",
    fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
)
