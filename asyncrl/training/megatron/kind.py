"""The kind of the trainer `megatron`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.finding import Finding
from asyncrl.config.learner_settings import EXPERTS
from asyncrl.config.settings import Config, LearnerSettings
from asyncrl.config.trainers import TrainerCapability, TrainerKind

if TYPE_CHECKING:
    from asyncrl.training.protocol import Trainer


class Megatron(TrainerKind):
    """Models of megatron-core, which ranks divide."""

    capabilities = frozenset({TrainerCapability.MODEL, TrainerCapability.PROCESSES, TrainerCapability.FP8})
    settings = frozenset({"layout", "mtp_weight", "router_bias_rate", "lora"})

    def open(self, config: Config, model: Path, base: Path) -> Trainer:
        from asyncrl.data.model_dir import ModelError
        from asyncrl.imports import absent
        from asyncrl.training.megatron.parallel_config import layout_of
        from asyncrl.training.settings import common_settings

        # If the library finds Transformer Engine, it takes optimiser, norms and generators from there: steps reach
        # other bits, and checkpoints another form. FP8 modules import it separately.
        if "transformer_engine" in sys.modules and "megatron.core" not in sys.modules:
            problem = "a function of the user has loaded Transformer Engine before it"
            raise ModelError(f'learner.trainer = "megatron": {problem}')
        with absent("transformer_engine"):
            from asyncrl.training.megatron.settings import MegatronSettings
            from asyncrl.training.megatron.trainer import MegatronTrainer

        own = MegatronSettings(
            **common_settings(config, model, base),
            layout=layout_of(config.learner),
            mtp_weight=config.learner.mtp_weight,
            router_bias_rate=config.learner.router_bias_rate,
        )
        return MegatronTrainer(model, own)

    def checks(self, learner: LearnerSettings) -> Iterator[Finding]:
        """Find a number of ranks that the layout does not divide, FP8 without a GPU, and what adapters exclude."""
        layout = learner.layout
        if learner.lora.rank:
            yield from _beside_adapters(learner)
        if learner.dtype == "fp8" and not learner.device.startswith("cuda"):
            message = f'found "fp8" with learner.device = "{learner.device}", expected "cuda"; change one'
            yield Finding(("learner.dtype", "learner.device"), message)
        sizes = {key: getattr(layout, key) for key in ("tensor", "context", "pipeline")}
        stage = learner.ranks // layout.pipeline
        if learner.ranks % (ranks := math.prod(sizes.values())):
            product = " times ".join(f"{key} = {size}" for key, size in sizes.items() if size > 1)
            message = f"found {learner.ranks} ranks, expected a multiple of {ranks}: {product} ranks hold one model"
            yield Finding((*(f"learner.layout.{key}" for key in sizes), "learner.ranks"), message)
        elif stage % (sharing := layout.expert * layout.expert_tensor):
            keys = ("learner.layout.expert", "learner.layout.expert_tensor", "learner.ranks")
            found = f"found expert times expert_tensor = {sharing}"
            yield Finding(keys, f"{found}, expected a divisor of the {stage} ranks of a stage")

    def preflight(self, config: Config, base: Path) -> Iterator[Finding]:
        from asyncrl.training.megatron.preflight import check_megatron

        yield from check_megatron(config, base)

    def memory_lines(self, config: Config, base: Path) -> Iterator[str]:
        from asyncrl.training.megatron.preflight import memory_lines

        yield from memory_lines(config, base)


def _beside_adapters(learner: LearnerSettings) -> Iterator[Finding]:
    """Find settings that cannot hold where adapters alone are trained."""
    for key in ("mtp_weight", "router_bias_rate"):
        if getattr(learner, key):
            yield Finding((f"learner.{key}", "learner.lora.rank"), "only adapters are trained; set 0")
    if learner.layout.expert_tensor > 1 and EXPERTS in learner.lora.targets:
        message = "ranks do not share the adapters of an expert; set 1, or leave experts out"
        yield Finding(("learner.layout.expert_tensor", "learner.lora.targets"), message)
    if learner.layout.pipeline > 1 and learner.lora.publish == "adapter":
        message = 'one rank writes an adapter, and stages hold parts of it; set 1, or learner.lora.publish = "merged"'
        yield Finding(("learner.layout.pipeline", "learner.lora.publish"), message)


KIND = Megatron()
