"""GLM-4.5: dense layers, then experts chosen by corrected scores; half of each head is rotated (arXiv 2508.06471)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.engine.embedded.config import ModelConfig
from asyncrl.training.megatron.weight_map import NORMS, Family, attention, corrected, mixture, partly_rotated


def _read(raw: Mapping[str, Any], shape: ModelConfig) -> ModelConfig:
    return msgspec.structs.replace(
        partly_rotated(raw, corrected(raw, shape), 0.5),
        has_qk_norm=bool(raw.get("use_qk_norm", False)),
        has_qkv_bias=bool(raw.get("attention_bias", False)),
    )


FAMILY = Family(
    "Glm4MoeForCausalLM",
    layer=lambda shape, number: {**NORMS, **attention(shape), **mixture(shape, number)},
    read=_read,
    rotates_part=True,
    needed=("first_k_dense_replace", "n_shared_experts"),
    fixed={"hidden_act": "silu", "norm_topk_prob": True},
)
