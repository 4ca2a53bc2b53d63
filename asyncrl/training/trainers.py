"""Trainers by their name in `learner.trainer`."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config.settings import Config
from asyncrl.training.protocol import Trainer
from asyncrl.training.scripted import ScriptedTrainer


def open_trainer(config: Config, model: Path) -> Trainer:
    """The trainer that the config names."""
    settings = config.learner
    if settings.trainer == "scripted":
        loaded = config.engine.kind != "scripted"  # a scripted engine reads no tensors
        return ScriptedTrainer(settings.scripted_step_s, model if loaded else None)
    from asyncrl.training.torch_trainer import TorchSettings, TorchTrainer  # loads torch

    return TorchTrainer(
        model,
        TorchSettings(device=settings.device, dtype=settings.dtype, micro_batch_tokens=settings.micro_batch_tokens),
    )
