"""GLM-4, dense: what attention and feed-forward layers make is normalised before it is added (arXiv 2406.12793)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.engine.embedded.config import ModelConfig
from asyncrl.training.megatron.weight_map import NORMS, Family, Rule, attention, intermediate, norm, partly_rotated

_LAYER = {
    **NORMS,
    "post_self_attn_layernorm.weight": norm("self_attn_bda.norm.weight"),
    "post_mlp_layernorm.weight": norm("mlp_bda.norm.weight"),
    "mlp.gate_up_proj.weight": Rule(
        "mlp.linear_fc1.weight",
        lambda s: (2 * intermediate(s), s.hidden),
        0,
        sections=lambda s: (intermediate(s), intermediate(s)),
    ),
    "mlp.down_proj.weight": Rule("mlp.linear_fc2.weight", lambda s: (s.hidden, intermediate(s)), 1),
}


def _read(raw: Mapping[str, Any], shape: ModelConfig) -> ModelConfig:
    return msgspec.structs.replace(partly_rotated(raw, shape, 0.5), has_qkv_bias=bool(raw.get("attention_bias", True)))


def _adapt(layer: Any, config: Any) -> None:
    from asyncrl.training.megatron.norms import normed_addition  # loads megatron-core

    layer.submodules.self_attn_bda = layer.submodules.mlp_bda = normed_addition(config)


FAMILY = Family(
    "Glm4ForCausalLM",
    layer=lambda shape, _: {**_LAYER, **attention(shape)},
    read=_read,
    rotates_part=True,
    options={"rotary_interleaved": True},
    adapt=_adapt,
    fixed={"hidden_act": "silu"},
)
