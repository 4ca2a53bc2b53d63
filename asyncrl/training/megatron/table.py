"""The table of a family: where each tensor of its checkpoints lies in a model of megatron-core, for both directions.

A rule names a parameter and the part of it, as a view: what is written to the view is imported, what is read from it is
exported. Moments and gradients have the shapes of their parameters, so the same views serve them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from asyncrl.engine.embedded.config import ModelConfig

if TYPE_CHECKING:
    import torch  # which callers that only look a family up need not load

Part: TypeAlias = "Callable[[torch.Tensor, ModelConfig], torch.Tensor]"
"""From a parameter of a rank, and the shape of the model, to the view of what a tensor has there."""


class Rule(NamedTuple):
    """The place of a tensor."""

    parameter: str  # name in the model; of a layer without `decoder.layers.N.`
    split: int | None = None  # dimension of the tensor that is divided over tensor-parallel ranks
    part: Part = lambda parameter, _: parameter


def _grouped(first: bool, last: bool) -> Part:
    """Rows of queries, keys or values: the library keeps those of one key-value head together, [q ..., k, v]."""

    def part(parameter: torch.Tensor, shape: ModelConfig) -> torch.Tensor:
        queries = shape.heads // shape.kv_heads
        by_group = parameter.view(-1, queries + 2, shape.head_dim, *parameter.shape[1:])
        start = queries + int(last) if not first else 0
        return by_group[:, start : queries if first else start + 1]

    return part


def _half(number: int) -> Part:
    """Rows of the gate, or those of the channels that it opens: each rank has its share of both, one after another."""
    return lambda parameter, _: parameter.view(2, -1, *parameter.shape[1:])[number]


def queries(suffix: str) -> Rule:
    """Weight or bias of the queries' projection."""
    return Rule(f"self_attention.linear_qkv.{suffix}", 0, _grouped(first=True, last=False))


def keys(suffix: str) -> Rule:
    """Weight or bias of the keys' projection."""
    return Rule(f"self_attention.linear_qkv.{suffix}", 0, _grouped(first=False, last=False))


def values(suffix: str) -> Rule:
    """Weight or bias of the values' projection."""
    return Rule(f"self_attention.linear_qkv.{suffix}", 0, _grouped(first=False, last=True))


ATTENTION: Mapping[str, Rule] = {
    "input_layernorm.weight": Rule("input_layernorm.weight"),
    "self_attn.q_proj.weight": queries("weight"),
    "self_attn.k_proj.weight": keys("weight"),
    "self_attn.v_proj.weight": values("weight"),
    "self_attn.o_proj.weight": Rule("self_attention.linear_proj.weight", 1),
    "post_attention_layernorm.weight": Rule("pre_mlp_layernorm.weight"),
}
"""Grouped-query attention and the norms of a layer, by the name after `model.layers.N.`."""

QK_NORMS: Mapping[str, Rule] = {
    "self_attn.q_norm.weight": Rule("self_attention.q_layernorm.weight"),
    "self_attn.k_norm.weight": Rule("self_attention.k_layernorm.weight"),
}

DENSE_LAYER: Mapping[str, Rule] = {
    **ATTENTION,
    "mlp.gate_proj.weight": Rule("mlp.linear_fc1.weight", 0, _half(0)),
    "mlp.up_proj.weight": Rule("mlp.linear_fc1.weight", 0, _half(1)),
    "mlp.down_proj.weight": Rule("mlp.linear_fc2.weight", 1),
}
"""Of a layer with a gated feed-forward layer."""


NUMBERED = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
"""The number of an expert in the name of its tensor; a table has `N` in its place."""

EXPERTS: Mapping[str, Rule] = {
    "mlp.gate.weight": Rule("mlp.router.weight"),
    "mlp.experts.N.gate_proj.weight": Rule("mlp.experts.gate_up", part=_half(0)),
    "mlp.experts.N.up_proj.weight": Rule("mlp.experts.gate_up", part=_half(1)),
    "mlp.experts.N.down_proj.weight": Rule("mlp.experts.down"),
}
"""Of a layer's experts; the parameters of a rank have one after another."""


@dataclass(frozen=True)
class Family:
    """Models of one architecture."""

    architecture: str  # as `config.json` names it
    layer: Mapping[str, Rule] = field(default_factory=lambda: DENSE_LAYER)
    options: Mapping[str, Any] = field(default_factory=dict)  # of its `TransformerConfig`
    ropes: tuple[str, ...] = ("default",)  # types of rotary embedding
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Fields of `config.json` that this family can have with one value alone, which they also have where left out."""
