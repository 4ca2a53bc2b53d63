"""Attention whose keys and values come from a latent of each token (arXiv 2412.19437, section 2.1.1)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import nn

from asyncrl.engine.embedded.config import ModelConfig
from asyncrl.training.megatron.context import PackedDocuments
from asyncrl.training.megatron.linear_precision import Multiply
from asyncrl.training.megatron.norms import Norm

_EPS = 1e-6  # of the norms of latents, for any other norms of the model, as in transformers


class LatentNorm(Norm):
    """The norm of a latent."""

    def __init__(self, config: Any, hidden_size: int, **_: Any) -> None:
        super().__init__(config, hidden_size, eps=_EPS)


class Whole(nn.Module):
    """A product that every rank holds whole and applies to its own tokens."""

    multiply: Multiply = staticmethod(F.linear)

    def __init__(self, config: Any, inputs: int, outputs: int) -> None:
        super().__init__()
        weight: Any = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        weight.sequence_parallel = config.sequence_parallel  # its gradient is summed over the ranks
        self.weight = weight

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the product, and no bias."""
        return self.multiply(hidden, self.weight), None


class _OfPositions(nn.Module):
    """The library's rotary embedding of a layer, with its signature; each token has the angles of its own position."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self._own = own

    def get_rotary_seq_len(self, *given: Any) -> PackedDocuments:
        """Return what `forward` reads."""
        *_, documents = given
        return documents  # type: ignore[no-any-return]

    def forward(self, packed: PackedDocuments, **_: Any) -> Any:
        """Return angles [T, 1, D], of YaRN with the scale of the rotated part."""
        longest = 1 << (max(length for _, length in packed.documents.groups) - 1).bit_length()  # few tables are kept
        found = self._own(longest, packed_seq=True)
        if isinstance(found, tuple):
            return found[0][packed.positions, 0], found[1]
        return found[packed.positions, 0]


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """The library's, with products to latents that are not divided: it divides them, and then forgets to add up the
    gradients of the keys that all heads share (Megatron-LM issue 1699).
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        own: nn.Module = self.rotary_pos_emb
        self.rotary_pos_emb: nn.Module = _OfPositions(own)
        hidden, keys = config.hidden_size, config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = Whole(config, hidden, keys)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = Whole(config, hidden, config.q_lora_rank)


def latent_options(shape: ModelConfig) -> dict[str, Any]:
    """Return the options of a `MLATransformerConfig`; none for attention of another kind."""
    latent, rope = shape.latent, shape.rope
    if latent is None:
        return {}
    stretched = rope.kind == "yarn"
    return {
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.rank,
        "qk_head_dim": latent.plain,
        "qk_pos_emb_head_dim": latent.rotated,
        "v_head_dim": latent.value,
        "rope_type": "yarn" if stretched else "rope",
        "rotary_base": rope.theta,
        "rotary_scaling_factor": rope.factor,
        "original_max_position_embeddings": rope.original_positions,
        "beta_fast": rope.fast_turns,
        "beta_slow": rope.slow_turns,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all if stretched else 0.0,
    }


def adapt_latent(attention: Any) -> None:
    """Put our modules into the library's specification of attention."""
    attention.module = LatentAttention
    attention.submodules.q_layernorm = attention.submodules.kv_layernorm = LatentNorm
