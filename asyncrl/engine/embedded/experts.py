"""The experts of a layer, and what a router chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from asyncrl.engine.embedded.config import ExpertsConfig

Product: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class Experts:
    """A mixture of gated feed-forward layers, of which each token takes a few (arXiv 2505.09388, section 2)."""

    def __init__(self, config: ExpertsConfig, router: Product, experts: Sequence[tuple[Product, Product]]) -> None:
        """
        Args:
            router: [N, H] to [N, E].
            experts: of each, [M, H] to gates and what they open, [M, 2F], and [M, F] to [M, H].
        """
        self._config, self._router, self._experts = config, router, experts

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose the experts of each token: [N, E] to [N, K]."""
        return logits.topk(self._config.chosen, -1).indices

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the chosen experts make of [N, H], a new tensor, and their numbers, [N, K]."""
        logits = self._router(x).float()
        chosen = self.choose(logits)
        if self._config.normalised:
            shares = logits.gather(1, chosen).softmax(-1)
        else:
            shares = logits.softmax(-1).gather(1, chosen)
        shares, found = shares.to(x.dtype), torch.zeros_like(x)
        for number in sorted(set(chosen.flatten().tolist())):
            gate_up, down = self._experts[number]
            rows, places = torch.where(chosen == number)
            gate, up = gate_up(x[rows]).chunk(2, -1)
            found.index_add_(0, rows, down(F.silu(gate).mul_(up)).mul_(shares[rows, places].unsqueeze(1)))
        return found, chosen
