"""The configuration of a Hugging Face model directory: architecture, rotary table, end tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.data.model_dir import expert_count, named_eos_ids, read_json
from asyncrl.engine.errors import EngineError

if TYPE_CHECKING:
    import torch


SERVED = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures that the embedded engine serves."""
ROPES = ("default", "llama3")


class RopeConfig(msgspec.Struct, frozen=True):
    """Rotary embedding; what follows `share` only matters to the types `llama3` and `yarn`."""

    kind: str = "default"
    theta: float = 10_000.0
    share: float = 1.0  # of a head that is rotated, its first channels
    factor: float = 1.0
    original_positions: int = 8192
    low_freq_factor: float = 1.0  # of llama3, as the next
    high_freq_factor: float = 4.0
    fast_turns: float = 32.0  # of yarn, as the rest
    slow_turns: float = 1.0
    mscale: float = 1.0
    mscale_all: float = 0.0

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """[share * head_dim / 2] radians per position, float32; not of the type `yarn`.

        Source: RoFormer (arXiv 2104.09864) section 3.4.2; the piecewise stretch is Llama 3.1's (arXiv 2407.21783).
        """
        import torch  # takes seconds, which callers that only read a configuration need not pay

        rotated = int(head_dim * self.share)
        frequencies = 1.0 / self.theta ** (torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated)
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
    dense_first: int = 0  # layers at the beginning that have a feed-forward layer instead
    shared: int = 0  # further channels of each token
    scale: float = 1.0  # of the shares
    groups: int = 1  # of experts, of which a token takes some
    groups_chosen: int = 1
    corrected: bool = False  # scores are sigmoids, and for the choice a bias of each expert is added


class LatentConfig(msgspec.Struct, frozen=True):
    """Attention whose keys and values come from one latent of a token."""

    query_rank: int  # channels of the query latent; 0 if queries are projected in one step
    rank: int  # of the latent of keys and values
    plain: int  # channels of a head that are not rotated
    rotated: int  # those that are, whose keys all heads share
    value: int  # channels of a value


class DeltaConfig(msgspec.Struct, frozen=True):
    """Gated delta nets in some layers instead of attention."""

    layers: tuple[bool, ...]  # for each layer of the model, whether it has one
    key_heads: int  # of queries and keys
    value_heads: int
    key_dim: int  # channels of a head
    value_dim: int
    kernel: int  # tokens that the convolution sees

    @property
    def mixed(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values, which the convolution mixes."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim


class ModelConfig(msgspec.Struct, frozen=True):
    """The shape of a decoder with gated SiLU feed-forward layers, or experts instead."""

    architecture: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    norm_eps: float
    tied: bool
    max_positions: int
    rope: RopeConfig
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    delta: DeltaConfig | None = None
    has_qk_norm: bool = False  # queries and keys are normalised per head before the rotation
    has_qkv_bias: bool = False  # the query, key and value projections add a bias
    further_layers: int = 0  # final layers on disk that predict tokens ahead; not served
    ahead: bool = False  # the first of them is trained


def read_config(directory: Path) -> ModelConfig:
    """The shape of a model that is served here, from `config.json`.

    Raises:
        EngineError: as `read_shape`, or the model is of a kind not served here.
    """
    raw = read_json(directory / "config.json", EngineError)
    architecture = (raw.get("architectures") or ["none named"])[0]
    if architecture not in SERVED:
        raise EngineError(
            f"model {directory}: architecture {architecture}; "
            f"the embedded engine serves {', '.join(SERVED)}; use sglang for others"
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
            raise EngineError(
                f"model {directory}: {key} is {raw[key]!r}; the embedded engine serves only {plain!r}; "
                'use engine.kind = "sglang" for others'
            )
    config = read_shape(directory)
    if config.rope.kind not in ROPES:
        raise EngineError(
            f"model {directory}: rope type {config.rope.kind!r}; the embedded engine serves {' and '.join(ROPES)}"
        )
    if config.rope.share != 1.0:
        raise EngineError(
            f"model {directory}: partial_rotary_factor is {config.rope.share:g}; the embedded engine serves only 1"
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
        heads, latent = int(raw["num_attention_heads"]), _read_latent(raw)
        head_dim = raw.get("head_dim") or int(raw["hidden_size"]) // heads
        return ModelConfig(
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            hidden=int(raw["hidden_size"]),
            intermediate=int(raw["intermediate_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=latent.plain + latent.rotated if latent else int(head_dim),
            norm_eps=float(raw["rms_norm_eps"]),
            tied=bool(raw.get("tie_word_embeddings", False)),
            max_positions=int(raw.get("max_position_embeddings", 2048)),
            rope=_read_rope(raw),
            experts=_read_experts(raw),
            latent=latent,
            has_qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
            has_qkv_bias=architecture == "Qwen2ForCausalLM",
            further_layers=int(raw.get("num_nextn_predict_layers") or raw.get("num_mtp_layers") or 0),
        )
    except KeyError as fault:
        raise EngineError(f"model {directory}: config.json lacks {fault}") from fault
    except (ValueError, TypeError, ArithmeticError, AttributeError) as fault:
        raise EngineError(
            f"model {directory}: config.json has a value that is no number of a model: {fault}"
        ) from fault


def _read_experts(raw: Mapping[str, Any]) -> ExpertsConfig | None:
    count = expert_count(raw)
    if not count:
        return None
    channels, chosen = int(raw["moe_intermediate_size"]), int(raw["num_experts_per_tok"])
    if not 1 <= chosen <= count:
        raise ValueError(f"num_experts_per_tok = {chosen}, expected 1 to {count}, the number of experts")
    return ExpertsConfig(
        count=count,
        chosen=chosen,
        intermediate=channels,
        normalised=bool(raw.get("norm_topk_prob", False)),
        dense_first=int(raw.get("first_k_dense_replace") or 0),
        shared=channels * int(raw.get("n_shared_experts") or 0),
        scale=float(raw.get("routed_scaling_factor") or 1.0),
        groups=int(raw.get("n_group") or 1),
        groups_chosen=int(raw.get("topk_group") or 1),
    )


def _read_latent(raw: Mapping[str, Any]) -> LatentConfig | None:
    if not raw.get("kv_lora_rank"):
        return None
    return LatentConfig(
        query_rank=int(raw.get("q_lora_rank") or 0),
        rank=int(raw["kv_lora_rank"]),
        plain=int(raw["qk_nope_head_dim"]),
        rotated=int(raw["qk_rope_head_dim"]),
        value=int(raw["v_head_dim"]),
    )


def rope_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a `config.json` says of its rotary embedding.

    Newer files keep everything in `rope_parameters`; older ones have `rope_theta` and `rope_scaling`. Where a user
    added `rope_scaling` to a newer one, as pages of models advise for longer texts, transformers goes by that.
    """
    found: Mapping[str, Any] = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    return found


def _read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    rope = rope_of(raw)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    share = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor")
    plain = RopeConfig(kind, theta, float(share or 1.0))
    if kind not in ("llama3", "yarn"):
        return plain
    given = {"factor": 1.0, "original_max_position_embeddings": raw.get("max_position_embeddings")}
    known = rope if kind == "llama3" else {**given, **rope}
    stretched = msgspec.structs.replace(
        plain, factor=float(known["factor"]), original_positions=int(known["original_max_position_embeddings"])
    )
    if kind == "llama3":
        turns = {"low_freq_factor": float(rope["low_freq_factor"]), "high_freq_factor": float(rope["high_freq_factor"])}
    else:
        turns = {
            "fast_turns": float(rope.get("beta_fast") or 32.0),
            "slow_turns": float(rope.get("beta_slow") or 1.0),
            "mscale": float(rope.get("mscale") or 1.0),
            "mscale_all": float(rope.get("mscale_all_dim") or 0.0),
        }
    return msgspec.structs.replace(stretched, **turns)


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
