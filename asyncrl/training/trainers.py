"""Trainers by their name in `learner.trainer`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.check_learner import has_critic
from asyncrl.config.engine_settings import Capability
from asyncrl.config.settings import Config, LearnerSettings
from asyncrl.data.model_dir import ModelError
from asyncrl.data.quantisation import quantised_as
from asyncrl.imports import absent
from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.protocol import Trainer
from asyncrl.training.scripted import ScriptedTrainer


def open_trainer(config: Config, model: Path, base: Path) -> Trainer:
    """The trainer that the config names.

    Args:
        model: directory of the model as it was before the run.
    """
    return TRAINERS[config.learner.trainer](config, model, base)


def _scripted(config: Config, model: Path, _base: Path) -> Trainer:
    loaded = config.engine.have(Capability.MODEL)
    learner = config.learner
    rate = learner.scripted_tokens_per_s
    return ScriptedTrainer(learner.scripted_step_s, model if loaded else None, tokens_per_s=rate)


def _torch(config: Config, model: Path, base: Path) -> Trainer:
    from asyncrl.training.lora import Lora  # loads torch
    from asyncrl.training.torch_trainer import TorchSettings, TorchTrainer

    settings = config.learner
    lora = settings.lora
    own = TorchSettings(
        **_common(config, model, base),
        activations=settings.activations,
        exchange=settings.exchange,
        moments=settings.moments,
        share_prefixes=settings.share_prefixes,
        lora=Lora(lora.rank, lora.alpha, tuple(lora.targets), lora.publish == "adapter") if lora.rank else None,
    )
    return TorchTrainer(model, own)


def _megatron(config: Config, model: Path, base: Path) -> Trainer:
    # If the library finds Transformer Engine, it takes optimiser, norms and generators from there: steps reach other
    # bits, and checkpoints another form. FP8 modules import it separately.
    if "transformer_engine" in sys.modules and "megatron.core" not in sys.modules:
        raise ModelError('learner.trainer = "megatron": a function of the user has loaded Transformer Engine before it')
    with absent("transformer_engine"):
        from asyncrl.training.megatron.settings import MegatronSettings
        from asyncrl.training.megatron.trainer import MegatronTrainer  # loads torch and megatron-core

    own = MegatronSettings(
        **_common(config, model, base),
        layout=layout_of(config.learner),
        mtp_weight=config.learner.mtp_weight,
        router_bias_rate=config.learner.router_bias_rate,
    )
    return MegatronTrainer(model, own)


def _common(config: Config, model: Path, base: Path) -> dict[str, Any]:
    """Return the fields of `TrainerSettings`."""
    settings = config.learner
    return {
        "device": settings.device,
        "dtype": settings.dtype,
        "micro_batch_tokens": settings.micro_batch_tokens,
        "recompute": settings.recompute,
        "compiled": settings.device.startswith("cuda") and settings.dtype != "float32" and settings.compile,
        "replays": settings.routing == "replay",
        "records": settings.routing == "trainer",
        "offloads": settings.offload_idle,
        "shares": config.weights.transport != "never",
        "quantised": quantised_as(model, config.weights.format),
        "teacher": base / settings.teacher.model if settings.teacher.model else None,
        "critic": _critic(config, model, base),
    }


def _critic(config: Config, model: Path, base: Path) -> Path | None:
    """Return the directory of the model that the critic begins as."""
    given = config.learner.critic.model
    return (base / given if given else model) if has_critic(config) else None


def layout_of(learner: LearnerSettings) -> Layout:
    """Return how the model is divided over the ranks; one rank holds it whole, or FSDP2 divides it invisibly."""
    return Layout(**msgspec.structs.asdict(learner.layout))


TRAINERS: dict[str, Callable[[Config, Path, Path], Trainer]] = {
    "torch": _torch,
    "megatron": _megatron,
    "scripted": _scripted,
}
