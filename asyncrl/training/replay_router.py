"""Routers of transformers models that follow recorded experts."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from asyncrl.training.routing import replayed

Routed: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Logits [T, E], shares [T, K] and the chosen experts [T, K]."""


class ReplayRouter(Qwen3MoeTopKRouter):
    """The router of transformers, which follows the experts set in it. A gradient reaches it through the shares."""

    recorded: torch.Tensor | None = None
    taken: torch.Tensor | None = None  # [T, K] in the newest pass

    def forward(self, hidden: torch.Tensor) -> Routed:
        """Choose experts."""
        logits = F.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
        shares = logits.softmax(-1, dtype=torch.float)
        chosen = self.taken = replayed(shares.topk(self.top_k, -1).indices, self.recorded)
        found = shares.gather(1, chosen)
        if self.norm_topk_prob:
            found = found / found.sum(-1, keepdim=True)
        return logits, found.to(logits.dtype), chosen


class _CorrectedReplay:
    """Before a router of sigmoid scores: as `ReplayRouter`."""

    recorded: torch.Tensor | None = None
    taken: torch.Tensor | None = None

    def forward(self: Any, hidden: torch.Tensor) -> Routed:
        """Choose experts."""
        logits, _, own = super().forward(hidden)  # type: ignore[misc]
        chosen = self.taken = replayed(own, self.recorded)
        shares = logits.sigmoid().gather(1, chosen)
        if self.norm_topk_prob:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)  # as transformers does
        return logits, shares * self.routed_scaling_factor, chosen


class DeepseekReplayRouter(_CorrectedReplay, DeepseekV3TopkRouter):
    """As `ReplayRouter`, of DeepSeek-V3."""


class Glm4ReplayRouter(_CorrectedReplay, Glm4MoeTopkRouter):
    """As `ReplayRouter`, of GLM-4.5."""


_REPLAY: dict[type, type] = {
    Qwen3MoeTopKRouter: ReplayRouter,
    DeepseekV3TopkRouter: DeepseekReplayRouter,
    Glm4MoeTopkRouter: Glm4ReplayRouter,
}


def replay_routers(model: Any) -> dict[int, Any]:
    """Let the routers of a transformers model replay; returns them by the numbers of their layers."""
    found = {}
    for name, module in model.named_modules():
        if type(module) in _REPLAY:
            module.__class__ = _REPLAY[type(module)]
        if type(module) in _REPLAY.values() and (layer := re.search(r"layers\.(\d+)\.", name)):
            found[int(layer[1])] = module
    return found
