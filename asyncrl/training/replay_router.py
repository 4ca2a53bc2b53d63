"""Routers of transformers models that go by what was recorded."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from asyncrl.training.routing import replayed


class ReplayRouter(Qwen3MoeTopKRouter):
    """The router of transformers, which goes by what is told to it. A gradient reaches it through the shares."""

    told: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits [T, E], shares [T, K] and the chosen experts."""
        logits = F.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
        shares = logits.softmax(-1, dtype=torch.float)
        chosen = replayed(shares.topk(self.top_k, -1).indices, self.told)
        found = shares.gather(1, chosen)
        if self.norm_topk_prob:
            found = found / found.sum(-1, keepdim=True)
        return logits, found.to(logits.dtype), chosen


def replay_routers(model: Any) -> list[ReplayRouter]:
    """Let the routers of a transformers model replay; returns them, layer by layer."""
    for router in [module for module in model.modules() if type(module) is Qwen3MoeTopKRouter]:
        router.__class__ = ReplayRouter
    return [module for module in model.modules() if isinstance(module, ReplayRouter)]
