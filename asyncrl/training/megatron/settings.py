"""The settings of the megatron trainer."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.settings import TrainerSettings


@dataclass(frozen=True, slots=True)
class MegatronSettings(TrainerSettings):
    """The settings of a `MegatronTrainer`."""

    layout: Layout = field(default_factory=Layout)
    # of the loss of the layer that predicts the token after the next one; 0: the layer is not trained
    mtp_weight: float = 0.0
    router_bias_rate: float = 0.0  # by which the biases that correct scores of experts move at each step
