"""The critic of a megatron trainer: it lies over the ranks as the policy does, with an optimiser of its own."""

from __future__ import annotations

import torch

from asyncrl.algorithms.rows import TrainRow
from asyncrl.algorithms.sums import Sums
from asyncrl.algorithms.value_loss import value_loss
from asyncrl.training.critic import COLUMNS, STEMS, Critic
from asyncrl.training.layouts import MicroBatch
from asyncrl.training.megatron.optimizer import MegatronOptimized
from asyncrl.training.megatron.policy import MegatronPolicy
from asyncrl.training.megatron.schedule import Schedule
from asyncrl.training.megatron.settings import MegatronSettings
from asyncrl.training.passes import Passes


class MegatronCritic(Critic):
    """See `Critic`."""

    def __init__(self, values: MegatronPolicy, settings: MegatronSettings, passes: Passes) -> None:
        """
        Args:
            values: a model whose head gives one number.
        """
        self.scorer, self._passes = values, passes
        self._own = MegatronOptimized(values, eps=settings.eps, stems=STEMS)
        self._schedule = Schedule(values, self._own, passes, settings.layout)

    def _passed(self, batches: list[list[TrainRow]], clip: float) -> Sums:

        def loss_of(batch: MicroBatch, scores: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, Sums]:
            loss, found = value_loss(scores[0], batch.tokens, clip=clip)
            return loss, {**found, "value_loss": loss.detach().clone()}

        return self._schedule.gradient(batches, COLUMNS, loss_of)
