"""The configuration of a Hugging Face model directory: architecture, rotary table, end tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.data.model_dir import ARCHITECTURES, named_eos_ids, read_json
from asyncrl.engine.errors import EngineError

if TYPE_CHECKING:
    import torch


ROPES = ("default", "llama3")


class RopeConfig(msgspec.Struct, frozen=True):
    """Rotary embedding; the last four fields only matter to the type `llama3`."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """[head_dim / 2] radians per position, float32.

        Source: RoFormer (arXiv 2104.09864) section 3.4.2; the piecewise stretch is Llama 3.1's (arXiv 2407.21783).
        """
        import torch  # takes seconds, which callers that only read a configuration need not pay

        frequencies = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
        if self.kind == "default":
            return frequencies
        wavelength = 2 * math.pi / frequencies
        low, high = self.low_freq_factor, self.high_freq_factor
        smooth = (self.original_positions / wavelength - low) / (high - low)
        return torch.lerp(frequencies / self.factor, frequencies, smooth.clamp(0.0, 1.0))


class ExpertsConfig(msgspec.Struct, frozen=True):
    """The shape of a mixture of experts, each of them a gated feed-forward layer."""

    count: int
    chosen: int  # experts of each token
    intermediate: int
    normalised: bool = True  # the chosen experts' shares sum to 1


class ModelConfig(msgspec.Struct, frozen=True):
    """The shape of a decoder with grouped-query attention and gated SiLU feed-forward layers, or experts instead."""

    architecture: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    max_positions: int
    rope: RopeConfig
    experts: ExpertsConfig | None = None  # of every layer

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the weights that every model of this shape has."""
        hidden = self.hidden
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.o_proj.weight": (hidden, self.heads * self.head_dim),
            **self._feed_forward(),
        }
        for kind, count in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            layer[f"self_attn.{kind}_proj.weight"] = (count * self.head_dim, hidden)
            if self.has_qkv_bias:
                layer[f"self_attn.{kind}_proj.bias"] = (count * self.head_dim,)
            if self.has_qk_norm and kind != "v":
                layer[f"self_attn.{kind}_norm.weight"] = (self.head_dim,)
        for number in range(self.layers):
            found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
        found["model.norm.weight"] = (hidden,)
        return found if self.tied else found | {"lm_head.weight": (self.vocab_size, hidden)}

    def _feed_forward(self) -> dict[str, tuple[int, ...]]:
        """Tensors of a layer behind its attention; those of one kind follow one another, expert by expert."""
        experts, hidden = self.experts, self.hidden
        ffn = experts.intermediate if experts else self.intermediate
        sizes = {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
        if experts is None:
            return {f"mlp.{kind}.weight": size for kind, size in sizes.items()}
        of_each = {
            f"mlp.experts.{number}.{kind}.weight": size
            for kind, size in sizes.items()
            for number in range(experts.count)
        }
        return {"mlp.gate.weight": (experts.count, hidden), **of_each}

    @property
    def has_qk_norm(self) -> bool:
        """Return whether queries and keys are normalised per head before the rotation."""
        return self.architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")

    @property
    def has_qkv_bias(self) -> bool:
        """Return whether the query, key and value projections add a bias."""
        return self.architecture == "Qwen2ForCausalLM"


def read_config(directory: Path) -> ModelConfig:
    """The shape of a model that is served here, from `config.json`.

    Raises:
        EngineError: as `read_shape`, or the model is of a kind not served here.
    """
    raw = read_json(directory / "config.json", EngineError)
    architecture = (raw.get("architectures") or ["none named"])[0]
    if architecture not in ARCHITECTURES:
        raise EngineError(
            f"model {directory}: architecture {architecture}; "
            f"the embedded engine serves {', '.join(ARCHITECTURES)}; use sglang for others"
        )
    for key, plain in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("use_sliding_window", False),
        ("decoder_sparse_step", 1),
        ("mlp_only_layers", []),
    ):
        if raw.get(key, plain) != plain:
            raise EngineError(f"model {directory}: {key} is {raw[key]!r}; the embedded engine serves only {plain!r}")
    config = read_shape(directory)
    if config.rope.kind not in ROPES:
        raise EngineError(
            f"model {directory}: rope type {config.rope.kind!r}; the embedded engine serves {' and '.join(ROPES)}"
        )
    return config


def read_shape(directory: Path) -> ModelConfig:
    """The model's shape from `config.json`.

    Raises:
        EngineError: the file is missing or torn, or a field is missing or no number.
    """
    raw = read_json(directory / "config.json", EngineError)
    architecture = (raw.get("architectures") or ["none named"])[0]
    try:
        heads = int(raw["num_attention_heads"])
        return ModelConfig(
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            hidden=int(raw["hidden_size"]),
            intermediate=int(raw["intermediate_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
            norm_eps=float(raw["rms_norm_eps"]),
            tied=bool(raw.get("tie_word_embeddings", False)),
            max_positions=int(raw.get("max_position_embeddings", 2048)),
            rope=_read_rope(raw),
            experts=_read_experts(raw),
        )
    except KeyError as fault:
        raise EngineError(f"model {directory}: config.json lacks {fault}") from fault
    except (ValueError, TypeError, ArithmeticError, AttributeError) as fault:
        raise EngineError(f"model {directory}: config.json holds what is no number of a model: {fault}") from fault


def _read_experts(raw: Mapping[str, Any]) -> ExpertsConfig | None:
    """Experts of a Qwen3-MoE; transformers 5 writes the same count as `num_local_experts`."""
    count = raw.get("num_experts") or raw.get("num_local_experts")
    if not count:
        return None
    return ExpertsConfig(
        count=int(count),
        chosen=int(raw["num_experts_per_tok"]),
        intermediate=int(raw["moe_intermediate_size"]),
        normalised=bool(raw.get("norm_topk_prob", False)),
    )


def _read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Newer files keep everything in `rope_parameters`; older ones have `rope_theta` and `rope_scaling`."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    if kind != "llama3":
        return RopeConfig(kind, theta)
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_positions=int(rope["original_max_position_embeddings"]),
    )


def read_eos_ids(directory: Path) -> frozenset[int]:
    """Token ids that end a text: generation_config.json, else config.json, else the tokenizer's `eos_token`."""
    named = named_eos_ids(directory, EngineError)
    if named is not None:
        return frozenset(named)
    if not (directory / "tokenizer_config.json").exists() or not (directory / "tokenizer.json").exists():
        return frozenset()
    token = read_json(directory / "tokenizer_config.json", EngineError).get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    added = read_json(directory / "tokenizer.json", EngineError).get("added_tokens", [])
    return frozenset(entry["id"] for entry in added if entry["content"] == content)
