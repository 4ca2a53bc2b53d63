"""The kind of the trainer `scripted`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.engine_settings import Capability
from asyncrl.config.settings import Config
from asyncrl.config.trainers import TrainerCapability, TrainerKind

if TYPE_CHECKING:
    from asyncrl.training.protocol import Trainer


class Scripted(TrainerKind):
    """No computation: settings of how other trainers compute a step may stay in a config, and change nothing."""

    capabilities = frozenset({TrainerCapability.LIVE})
    settings = frozenset({"exchange", "activations", "moments", "lora"})

    def open(self, config: Config, model: Path, _base: Path) -> Trainer:
        from asyncrl.training.scripted.trainer import ScriptedTrainer

        learner, loaded = config.learner, config.engine.have(Capability.MODEL)
        rate = learner.scripted_tokens_per_s
        return ScriptedTrainer(learner.scripted_step_s, model if loaded else None, tokens_per_s=rate)


KIND = Scripted()
