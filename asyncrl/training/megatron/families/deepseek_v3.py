"""DeepSeek-V3, and models with its layers: Moonlight, which projects queries in one step, and Kimi K2.

Keys and values come from one latent of a token, and queries may come from another (arXiv 2412.19437, section 2.1.1).
"""

from __future__ import annotations

from asyncrl.engine.embedded.config import LatentConfig, ModelConfig
from asyncrl.training.megatron.weight_map import NORMS, Family, Rows, Rule, corrected, mixture


def _latent(shape: ModelConfig) -> LatentConfig:
    assert shape.latent is not None  # `read_shape` refuses such a model
    return shape.latent


def _queries(shape: ModelConfig) -> int:
    return shape.heads * shape.head_dim


def _values(shape: ModelConfig) -> int:
    return shape.heads * (_latent(shape).plain + _latent(shape).value)


_AT_ONCE: Rows = {
    "self_attn.q_proj.weight": Rule("self_attention.linear_q_proj.weight", lambda s: (_queries(s), s.hidden), 0)
}

_OF_A_LATENT: Rows = {
    "self_attn.q_a_proj.weight": Rule(
        "self_attention.linear_q_down_proj.weight", lambda s: (_latent(s).query_rank, s.hidden)
    ),
    "self_attn.q_a_layernorm.weight": Rule("self_attention.q_layernorm.weight", lambda s: (_latent(s).query_rank,)),
    "self_attn.q_b_proj.weight": Rule(
        "self_attention.linear_q_up_proj.weight", lambda s: (_queries(s), _latent(s).query_rank), 0
    ),
}

_KEYS_AND_VALUES: Rows = {
    "self_attn.kv_a_proj_with_mqa.weight": Rule(
        "self_attention.linear_kv_down_proj.weight", lambda s: (_latent(s).rank + _latent(s).rotated, s.hidden)
    ),
    "self_attn.kv_a_layernorm.weight": Rule("self_attention.kv_layernorm.weight", lambda s: (_latent(s).rank,)),
    "self_attn.kv_b_proj.weight": Rule(
        "self_attention.linear_kv_up_proj.weight", lambda s: (_values(s), _latent(s).rank), 0
    ),
    "self_attn.o_proj.weight": Rule(
        "self_attention.linear_proj.weight", lambda s: (s.hidden, s.heads * _latent(s).value), 1
    ),
}


def _layer(shape: ModelConfig, number: int) -> Rows:
    queries = _OF_A_LATENT if _latent(shape).query_rank else _AT_ONCE
    return {**NORMS, **queries, **_KEYS_AND_VALUES, **mixture(shape, number)}


FAMILY = Family(
    "DeepseekV3ForCausalLM",
    layer=_layer,
    read=corrected,
    ropes=("default", "yarn"),
    needed=("first_k_dense_replace", "n_group", "n_shared_experts", "routed_scaling_factor", "topk_group"),
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_interleave": True,
        "moe_layer_freq": 1,
    },
)
