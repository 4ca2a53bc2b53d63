"""Qwen2.5: queries, keys and values have biases (arXiv 2412.15115, section 2)."""

from __future__ import annotations

from asyncrl.training.megatron.weight_map import Family

FAMILY = Family("Qwen2ForCausalLM", fixed={"hidden_act": "silu", "use_sliding_window": False})
