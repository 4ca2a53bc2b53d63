"""The layer that predicts the token after the next one (multi-token prediction, arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.spec_utils import build_module
from torch import nn

from asyncrl.training.megatron.context import PackedDocuments
from asyncrl.training.megatron.mla import Whole
from asyncrl.training.megatron.norms import Norm


class MtpBlock(nn.Module):
    """A layer on the last stage, after the norm of the trunk."""

    def __init__(self, config: Any, layer: Any, vp_stage: int | None) -> None:
        """
        Args:
            layer: the library's specification.
            vp_stage: number of the chunk in its stage, if there are several.
        """
        super().__init__()
        size, eps = config.hidden_size, config.layernorm_epsilon
        self.enorm, self.hnorm, self.norm = (Norm(config, size, eps) for _ in range(3))
        self.eh_proj = Whole(config, 2 * size, size)
        self.layer = build_module(layer, config=config, layer_number=1, vp_stage=vp_stage)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, documents: PackedDocuments, angles: torch.Tensor | None
    ) -> torch.Tensor:
        """Return hidden states for the head.

        Args:
            embedded: [T of this rank, 1, H] of the token after each.
            hidden: as `embedded`, of the trunk.
            documents: as the trunk has them.
            angles: rotary; None where the layer has its own.
        """
        joined, _ = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        made, _ = self.layer(joined, packed_seq_params=documents, rotary_pos_emb=angles)
        return self.norm(made)  # type: ignore[no-any-return]
