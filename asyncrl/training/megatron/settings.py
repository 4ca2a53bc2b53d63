"""The settings of the megatron trainer."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.training.megatron.layout import Layout
from asyncrl.training.settings import TrainerSettings


@dataclass(frozen=True, slots=True)
class MegatronSettings(TrainerSettings):
    """The settings of a `MegatronTrainer`."""

    layout: Layout = field(default_factory=Layout)
