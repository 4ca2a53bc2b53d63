"""Trainers by their name in `learner.trainer`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from asyncrl.config.check_roles import has_critic
from asyncrl.config.settings import Config
from asyncrl.training.megatron.layout import Layout
from asyncrl.training.protocol import Trainer
from asyncrl.training.scripted import ScriptedTrainer


def open_trainer(config: Config, model: Path, base: Path) -> Trainer:
    """The trainer that the config names.

    Args:
        model: directory of the model as it was before the run.
        base: folder that the config's relative paths start from.
    """
    return TRAINERS[config.learner.trainer](config, model, base)


def _scripted(config: Config, model: Path, _base: Path) -> Trainer:
    loaded = config.engine.kind != "scripted"  # a scripted engine reads no tensors
    return ScriptedTrainer(config.learner.scripted_step_s, model if loaded else None)


def _torch(config: Config, model: Path, base: Path) -> Trainer:
    settings = config.learner
    from asyncrl.training.lora import Lora  # loads torch
    from asyncrl.training.torch_trainer import TorchSettings, TorchTrainer

    return TorchTrainer(
        model,
        TorchSettings(
            device=settings.device,
            dtype=settings.dtype,
            packing=settings.packing,
            micro_batch_tokens=settings.micro_batch_tokens,
            recompute=settings.recompute,
            compiled=settings.device.startswith("cuda") and settings.dtype == "bfloat16" and settings.compile,
            teacher=base / settings.teacher.model if settings.teacher.model else None,
            critic=_critic(config, model, base),
            lora=Lora(settings.lora.rank, settings.lora.alpha, tuple(settings.lora.targets))
            if settings.lora.rank
            else None,
            replays=settings.routing == "replay",
            shares=config.weights.direct != "never",
        ),
    )


def _megatron(config: Config, model: Path, base: Path) -> Trainer:
    from asyncrl.training.megatron.settings import MegatronSettings
    from asyncrl.training.megatron.trainer import MegatronTrainer  # loads torch and megatron-core

    settings = config.learner
    return MegatronTrainer(
        model,
        MegatronSettings(
            layout=layout_of(config),
            dtype=settings.dtype,
            device=settings.device,
            micro_batch_tokens=settings.micro_batch_tokens,
            recompute=settings.recompute,
            replays=settings.routing == "replay",
            shares=config.weights.direct != "never",
            teacher=base / settings.teacher.model if settings.teacher.model else None,
            critic=_critic(config, model, base),
        ),
    )


def _critic(config: Config, model: Path, base: Path) -> Path | None:
    """Return the directory of the model that the critic begins as."""
    given = config.learner.critic.model
    return (base / given if given else model) if has_critic(config) else None


def layout_of(config: Config) -> Layout:
    """Return how the model lies over the ranks; one rank holds it whole, or FSDP2 divides it out of sight."""
    return Layout(**msgspec.structs.asdict(config.learner.layout))


TRAINERS: dict[str, Callable[[Config, Path, Path], Trainer]] = {
    "torch": _torch,
    "megatron": _megatron,
    "scripted": _scripted,
}
