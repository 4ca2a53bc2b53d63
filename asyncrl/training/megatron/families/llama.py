"""Llama 3: the plain dense layer, with the stretched rotary embedding of Llama 3.1 (arXiv 2407.21783)."""

from __future__ import annotations

from asyncrl.training.megatron.weight_map import Family

FAMILY = Family(
    "LlamaForCausalLM",
    ropes=("default", "llama3"),
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
)
