"""Norms inside the library's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn
from torch.nn.functional import rms_norm


class Norm(nn.RMSNorm):
    """RMSNorm as the library calls it; its own refuses sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self._centred = config.layernorm_zero_centered_gamma  # the weight is what the gain exceeds 1 by
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel  # then each rank has the gradient of its own tokens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` with its last dimension normalised; a centred gain is applied in float32, as in transformers."""
        if not self._centred:
            return super().forward(x)
        return rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).type_as(x)


class NormedAddition(nn.Module):
    """Adds what a part of a layer made to what went in, normalised, as the library calls its addition."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, _training: bool, _fused: bool) -> Callable[..., torch.Tensor]:
        """Return the addition."""
        return self._added

    def _added(self, made: tuple[torch.Tensor, None], before: torch.Tensor, _dropout: float) -> torch.Tensor:
        normed: torch.Tensor = self.norm(made[0])
        return before + normed


def normed_addition(config: Any) -> ModuleSpec:
    """Return the replacement of the library's addition: `self_attn_bda` or `mlp_bda` of a layer."""
    return ModuleSpec(NormedAddition, params={"config": config})
