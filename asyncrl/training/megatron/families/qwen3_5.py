"""Qwen3.5, dense: three of four layers have a gated delta net, the fourth has attention with a gate of its output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.engine.embedded.config import DeltaConfig, ModelConfig
from asyncrl.training.megatron.weight_map import (
    FEED_FORWARD,
    NORMS,
    Family,
    Rows,
    Rule,
    attention,
    grouped,
    partly_rotated,
    projection,
)

_SIZES = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "kernel": "linear_conv_kernel_dim",
}
"""Fields of `config.json`, by those of `DeltaConfig`."""


def _delta(shape: ModelConfig) -> DeltaConfig:
    assert shape.delta is not None  # `_read` makes it
    return shape.delta


def _mixed(shape: ModelConfig) -> tuple[int, ...]:
    return _delta(shape).mixed


def _values(shape: ModelConfig) -> int:
    return _delta(shape).mixed[-1]


def _heads(shape: ModelConfig) -> tuple[int, ...]:
    return (_delta(shape).value_heads,)


_DELTA_NET: Rows = {
    "linear_attn.out_proj.weight": Rule("self_attention.out_proj.weight", lambda s: (s.hidden, _values(s)), 1),
    "linear_attn.in_proj_qkv.weight": Rule(
        "self_attention.in_proj_qkv.weight", lambda s: (sum(_mixed(s)), s.hidden), 0, sections=_mixed
    ),
    "linear_attn.in_proj_z.weight": Rule("self_attention.in_proj_z.weight", lambda s: (_values(s), s.hidden), 0),
    "linear_attn.in_proj_b.weight": Rule("self_attention.in_proj_b.weight", lambda s: (*_heads(s), s.hidden), 0),
    "linear_attn.in_proj_a.weight": Rule("self_attention.in_proj_a.weight", lambda s: (*_heads(s), s.hidden), 0),
    "linear_attn.conv1d.weight": Rule(
        "self_attention.conv1d.weight", lambda s: (sum(_mixed(s)), 1, _delta(s).kernel), 0, sections=_mixed
    ),
    "linear_attn.A_log": Rule("self_attention.A_log", _heads, 0),
    "linear_attn.dt_bias": Rule("self_attention.dt_bias", _heads, 0),
    "linear_attn.norm.weight": Rule("self_attention.norm.weight", lambda s: (_delta(s).value_dim,)),
}

_GATED_QUERIES: Rows = {
    "self_attn.q_proj.weight": projection("weight", lambda s: 2 * s.heads, grouped(first=True, last=False, per_head=2)),
    "self_attn.k_proj.weight": projection("weight", lambda s: s.kv_heads, grouped(False, last=False, per_head=2)),
    "self_attn.v_proj.weight": projection("weight", lambda s: s.kv_heads, grouped(False, last=True, per_head=2)),
}


def _layer(shape: ModelConfig, number: int) -> Rows:
    attended = _DELTA_NET if _delta(shape).layers[number] else {**attention(shape), **_GATED_QUERIES}
    return {**NORMS, **attended, **FEED_FORWARD}


def _read(raw: Mapping[str, Any], shape: ModelConfig) -> ModelConfig:
    layers = tuple(kind == "linear_attention" for kind in raw["layer_types"])
    delta = DeltaConfig(layers, **{key: int(raw[field]) for key, field in _SIZES.items()})
    return msgspec.structs.replace(partly_rotated(raw, shape, 0.25), has_qk_norm=True, delta=delta)


FAMILY = Family(
    "Qwen3_5ForCausalLM",
    layer=_layer,
    read=_read,
    options={"attention_output_gate": True, "layernorm_zero_centered_gamma": True},
    rotates_part=True,
    carries_state=True,
    needed=("layer_types", *_SIZES.values()),
    fixed={"hidden_act": "silu", "attention_bias": False},
)
