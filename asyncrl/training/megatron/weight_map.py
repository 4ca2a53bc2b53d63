"""The table of a family: the place of each checkpoint tensor in a model of megatron-core, for both directions.

A rule names a parameter and a view of its part: import writes to the view, export reads it. Moments and gradients have
the shapes of their parameters, so the same views serve them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from asyncrl.engine.embedded.config import ModelConfig, rope_of

if TYPE_CHECKING:
    import torch  # which callers that only look a family up need not load

Part: TypeAlias = "Callable[[torch.Tensor, ModelConfig], torch.Tensor]"
"""From a parameter of a rank, and the shape of the model, to the view of what a tensor has there."""

Size: TypeAlias = Callable[[ModelConfig], tuple[int, ...]]
"""From the shape of the model to that of a tensor on disk."""


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CORRECTION = "mlp.gate.e_score_correction_bias"


class Rule(NamedTuple):
    """The place of a tensor."""

    parameter: str  # name in the model; of a layer without `decoder.layers.N.`
    size: Size
    split: int | None = None  # dimension that is divided over tensor-parallel ranks; of experts over theirs
    part: Part = lambda parameter, _: parameter
    sections: Size | None = None  # lengths of tensors along the divided dimension, each of which is divided separately
    trained: bool = True  # else it is a buffer, in float32 everywhere
    frozen: bool = False  # only adapters are trained
    adapter: bool = False
    stacks: bool = False  # experts along the first dimension, of which each rank has some


Rows: TypeAlias = Mapping[str, Rule]
"""Rules by the names of tensors after `model.layers.N.`; those of an expert have `N` for its number."""


class Row(NamedTuple):
    """One tensor of a model."""

    name: str  # on disk
    rule: Rule
    size: tuple[int, ...]
    layer: int  # whose stage has it
    inside: bool  # the layer; otherwise before the first one or after the last
    ahead: bool = False  # of the layer that predicts the token after the next one


def grouped(first: bool, last: bool, per_head: int = 1) -> Part:
    """Rows of queries, keys or values: the library keeps those of one key-value head together, [q ..., k, v].

    Args:
        per_head: blocks of `head_dim` rows that each query head has.
    """

    def part(parameter: torch.Tensor, shape: ModelConfig) -> torch.Tensor:
        queries = shape.heads // shape.kv_heads * per_head
        by_group = parameter.view(-1, queries + 2, shape.head_dim, *parameter.shape[1:])
        start = queries + int(last) if not first else 0
        return by_group[:, start : queries if first else start + 1]

    return part


def half(number: int) -> Part:
    """Rows of the gate, or those of the channels that it opens: each rank has its share of both, one after another."""
    return lambda parameter, _: parameter.view(2, -1, *parameter.shape[1:])[number]


def _hidden(shape: ModelConfig) -> tuple[int, ...]:
    return (shape.hidden,)


def norm(parameter: str) -> Rule:
    """Gain of a norm over the channels of a token."""
    return Rule(parameter, _hidden)


def projection(suffix: str, heads: Callable[[ModelConfig], int], part: Part) -> Rule:
    """Rows of queries, keys or values.

    Args:
        suffix: "weight" or "bias".
        heads: number of blocks of `head_dim` rows.
    """

    def size(shape: ModelConfig) -> tuple[int, ...]:
        rows = heads(shape) * shape.head_dim
        return (rows, shape.hidden) if suffix == "weight" else (rows,)

    return Rule(f"self_attention.linear_qkv.{suffix}", size, 0, part)


def _projections(suffix: str) -> Rows:
    """Weights or biases of the projections to queries, keys and values."""
    return {
        f"self_attn.q_proj.{suffix}": projection(suffix, lambda s: s.heads, grouped(first=True, last=False)),
        f"self_attn.k_proj.{suffix}": projection(suffix, lambda s: s.kv_heads, grouped(first=False, last=False)),
        f"self_attn.v_proj.{suffix}": projection(suffix, lambda s: s.kv_heads, grouped(first=False, last=True)),
    }


def gated(name: str, parameter: str, channels: Callable[[ModelConfig], int]) -> Rows:
    """Weights of a gated feed-forward layer.

    Args:
        name: of the layer on disk: "mlp".
        parameter: of the layer in the model.
        channels: between its products.
    """
    return {
        f"{name}.gate_proj.weight": Rule(
            f"{parameter}.linear_fc1.weight", lambda s: (channels(s), s.hidden), 0, half(0)
        ),
        f"{name}.up_proj.weight": Rule(f"{parameter}.linear_fc1.weight", lambda s: (channels(s), s.hidden), 0, half(1)),
        f"{name}.down_proj.weight": Rule(f"{parameter}.linear_fc2.weight", lambda s: (s.hidden, channels(s)), 1),
    }


NORMS: Rows = {
    "input_layernorm.weight": norm("input_layernorm.weight"),
    "post_attention_layernorm.weight": norm("pre_mlp_layernorm.weight"),
}
"""Of a layer: norms before attention and before the part after it."""

_GROUPED_QUERY: Rows = {
    **_projections("weight"),
    "self_attn.o_proj.weight": Rule("self_attention.linear_proj.weight", lambda s: (s.hidden, s.heads * s.head_dim), 1),
}

_QK_NORMS: Rows = {
    f"self_attn.{one}_norm.weight": Rule(f"self_attention.{one}_layernorm.weight", lambda s: (s.head_dim,))
    for one in "qk"
}


def attention(shape: ModelConfig) -> Rows:
    """Grouped-query attention, with the biases and norms that the model has."""
    biases = _projections("bias") if shape.has_qkv_bias else {}
    return {**_GROUPED_QUERY, **biases, **(_QK_NORMS if shape.has_qk_norm else {})}


def intermediate(shape: ModelConfig) -> int:
    """Channels of a feed-forward layer."""
    return shape.intermediate


FEED_FORWARD: Rows = gated("mlp", "mlp", intermediate)


def dense_layer(shape: ModelConfig, _number: int) -> Rows:
    """A layer of grouped-query attention and a gated feed-forward layer."""
    return {**NORMS, **attention(shape), **FEED_FORWARD}


NUMBERED = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
"""The number of an expert in the name of its tensor; a table has `N` in its place."""
_ANY = ".experts.N."


def _channels(shape: ModelConfig) -> int:
    return shape.experts.intermediate if shape.experts else 0


def _shared_channels(shape: ModelConfig) -> int:
    return shape.experts.shared if shape.experts else 0


def _count(shape: ModelConfig) -> tuple[int, ...]:
    return (shape.experts.count if shape.experts else 0,)


_EXPERTS: Rows = {
    "mlp.gate.weight": Rule("mlp.router.weight", lambda s: (*_count(s), s.hidden)),
    "mlp.experts.N.gate_proj.weight": Rule("mlp.experts.gate_up", lambda s: (_channels(s), s.hidden), 0, half(0)),
    "mlp.experts.N.up_proj.weight": Rule("mlp.experts.gate_up", lambda s: (_channels(s), s.hidden), 0, half(1)),
    "mlp.experts.N.down_proj.weight": Rule("mlp.experts.down", lambda s: (s.hidden, _channels(s)), 1),
}
"""Of a layer's experts; the parameters of a rank have one after another."""

_CORRECTION: Rows = {CORRECTION: Rule("mlp.router.expert_bias", _count, trained=False)}


_AHEAD: Rows = {
    "enorm.weight": norm("enorm.weight"),
    "hnorm.weight": norm("hnorm.weight"),
    "eh_proj.weight": Rule("eh_proj.weight", lambda s: (s.hidden, 2 * s.hidden)),
    "shared_head.norm.weight": norm("norm.weight"),
}
"""In addition to a layer, of the layer that predicts the token after the next one; on disk it repeats embedding and
head.
"""


def mixture(shape: ModelConfig, number: int) -> Rows:
    """Rows of the part after attention: experts, and the number of each token; or a feed-forward layer."""
    experts = shape.experts
    if experts is None or number < experts.dense_first:
        return FEED_FORWARD
    correction = _CORRECTION if experts.corrected else {}
    shared = gated("mlp.shared_experts", "mlp.shared_experts", _shared_channels) if experts.shared else {}
    return {**_EXPERTS, **correction, **shared}


def corrected(_raw: Mapping[str, Any], shape: ModelConfig) -> ModelConfig:
    """Return the shape of a model whose experts are chosen by scores that a bias of each corrects."""
    experts = shape.experts and msgspec.structs.replace(shape.experts, corrected=True, normalised=True)
    return msgspec.structs.replace(shape, experts=experts)


def partly_rotated(raw: Mapping[str, Any], shape: ModelConfig, share: float) -> ModelConfig:
    """Return the shape of a model that rotates this share of each head where `config.json` does not say how much."""
    if "partial_rotary_factor" in {**raw, **rope_of(raw)}:
        return shape
    return msgspec.structs.replace(shape, rope=msgspec.structs.replace(shape.rope, share=share))


@dataclass(frozen=True)
class Family:
    """Models of one architecture."""

    architecture: str  # as `config.json` names it
    layer: Callable[[ModelConfig, int], Rows] = dense_layer  # rows of a layer, by the shape and its number
    read: Callable[[Mapping[str, Any], ModelConfig], ModelConfig] = lambda _raw, shape: shape
    """From `config.json` and the common fields (`read_shape`) to the shape of this family."""
    options: Mapping[str, Any] = field(default_factory=dict)  # of its `TransformerConfig`
    adapt: Callable[[Any, Any], None] = lambda _layer, _config: None
    """Change the library's ModuleSpec of a layer, made for a TransformerConfig, where the family has other modules."""
    ropes: tuple[str, ...] = ("default",)  # types of rotary embedding
    rotates_part: bool = False  # of a head, where `config.json` says so
    carries_state: bool = False  # some layers do, from token to token
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Fields of `config.json` that this family can have with one value alone, which they also have where left out."""
    needed: tuple[str, ...] = ()
    """Fields of `config.json` in addition to the common ones, with defaults of transformers from a published model."""

    def rows(self, shape: ModelConfig) -> Iterator[Row]:
        """Yield every tensor of a model; those of one kind follow one another, expert by expert."""
        vocabulary = shape.vocab_size, shape.hidden
        last = shape.layers - 1
        yield _row(EMBEDDING, Rule("embedding.word_embeddings.weight", lambda _: vocabulary, 0), shape)
        for number in range(shape.layers):
            for name, rule in _each(number, self.layer(shape, number), shape):
                yield Row(name, rule, rule.size(shape), number, inside=True)
        yield _row("model.norm.weight", norm("decoder.final_layernorm.weight"), shape, last)
        if not shape.tied:
            yield _row(HEAD, Rule("output_layer.weight", lambda _: vocabulary, 0), shape, last)
        if shape.ahead:
            for prefix, rows in (("ahead.", _AHEAD), ("ahead.layer.", self.layer(shape, shape.layers))):
                for name, rule in _each(shape.layers, rows, shape):
                    placed = rule._replace(parameter=prefix + rule.parameter)
                    yield Row(name, placed, rule.size(shape), last, inside=False, ahead=True)

    def tensors(self, shape: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the tensors that every model of this shape has on disk."""
        return {row.name: row.size for row in self.rows(shape)}


def _each(number: int, rows: Rows, shape: ModelConfig) -> Iterator[tuple[str, Rule]]:
    """Yield the tensors of a layer by their names on disk, those of each expert too."""
    for name, rule in rows.items():
        for one in range(_count(shape)[0]) if _ANY in name else (0,):
            yield f"model.layers.{number}.{name.replace(_ANY, f'.experts.{one}.')}", rule


def _row(name: str, rule: Rule, shape: ModelConfig, layer: int = 0) -> Row:
    return Row(name, rule, rule.size(shape), layer, inside=False)
