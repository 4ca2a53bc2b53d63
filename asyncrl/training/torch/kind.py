"""The kind of the trainer `torch`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.finding import Finding
from asyncrl.config.learner_settings import EXPERTS
from asyncrl.config.setting_types import changed_keys
from asyncrl.config.settings import Config, LearnerSettings
from asyncrl.config.trainers import TrainerCapability, TrainerKind

if TYPE_CHECKING:
    from asyncrl.training.protocol import Trainer


class Torch(TrainerKind):
    """Models of transformers, on the CPU or on GPUs."""

    capabilities = frozenset(
        {TrainerCapability.MODEL, TrainerCapability.PROCESSES, TrainerCapability.PADS, TrainerCapability.LIVE}
    )
    settings = frozenset(
        {"layout", "share_prefixes", "exchange", "activations", "offload_activations", "moments", "lora", "head"}
    )

    def open(self, config: Config, model: Path, base: Path) -> Trainer:
        from asyncrl.training.settings import common_settings
        from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer

        learner = config.learner
        own = TorchSettings(
            **common_settings(config, model, base),
            activations=learner.activations,
            offload_activations=learner.offload_activations,
            exchange=learner.exchange,
            exact_head=learner.head == "float32",
            moments=learner.moments,
            context=learner.layout.context,
            share_prefixes=learner.share_prefixes,
        )
        return TorchTrainer(model, own)

    def checks(self, learner: LearnerSettings) -> Iterator[Finding]:
        """Find divisions that only other trainers have, and what several ranks cannot do."""
        context, own = learner.layout.context, f'the trainer "{learner.trainer}"'
        if others := [key for key in changed_keys(learner.layout) if key != "context"]:
            message = f'{own} has only context; leave out {", ".join(others)}, or set learner.trainer = "megatron"'
            yield Finding((*(f"learner.layout.{key}" for key in others), "learner.trainer"), message)
        if learner.ranks % context:
            message = f"found {learner.ranks} ranks, expected a multiple of context = {context}"
            yield Finding(("learner.layout.context", "learner.ranks"), message)
        for key, found, wanted in (
            ("share_prefixes", learner.share_prefixes, "false"),
            ("routing", learner.routing != "own", '"own"'),
        ):
            if found and context > 1:
                message = f"{own} cannot do so where ranks share tokens (context = {context}); set {wanted}"
                yield Finding((f"learner.{key}", "learner.layout.context"), message)
        if learner.lora.rank and EXPERTS in learner.lora.targets and learner.ranks > 1:
            message = f"adapters of experts are on one rank, found learner.ranks = {learner.ranks}; set 1"
            yield Finding(("learner.lora.targets", "learner.ranks"), message)

    def preflight(self, config: Config, base: Path) -> Iterator[Finding]:
        """Find models of which ranks cannot share the tokens."""
        learner = config.learner
        if learner.layout.context == 1:
            return
        from asyncrl.data.model_dir import ModelError
        from asyncrl.training.document_model import undivided
        from asyncrl.training.transformers_model import arrangement_in

        for key, given in (
            ("model.path", config.model.path),
            ("learner.teacher.model", learner.teacher.model),
            ("learner.critic.model", learner.critic.model),
        ):
            try:
                kind = arrangement_in(base / given).undivided if given else ""
            except ModelError:
                continue  # reported where the model itself is checked
            if kind:
                yield Finding(("learner.layout.context", key), undivided(kind, base / given))

    def memory_lines(self, config: Config, base: Path) -> Iterator[str]:
        from asyncrl.training.torch.memory import memory_lines

        yield from memory_lines(config, base)


KIND = Torch()
