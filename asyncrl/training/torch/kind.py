"""The kind of the trainer `torch`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.settings import Config
from asyncrl.config.trainers import TrainerCapability, TrainerKind

if TYPE_CHECKING:
    from asyncrl.training.protocol import Trainer


class Torch(TrainerKind):
    """Models of transformers, on the CPU or on GPUs."""

    capabilities = frozenset(
        {TrainerCapability.MODEL, TrainerCapability.PROCESSES, TrainerCapability.PADS, TrainerCapability.LIVE}
    )
    settings = frozenset(
        {"share_prefixes", "exchange", "activations", "offload_activations", "moments", "lora", "head"}
    )

    def open(self, config: Config, model: Path, base: Path) -> Trainer:
        from asyncrl.training.lora import Lora
        from asyncrl.training.settings import common_settings
        from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer

        learner, lora = config.learner, config.learner.lora
        own = TorchSettings(
            **common_settings(config, model, base),
            activations=learner.activations,
            offload_activations=learner.offload_activations,
            exchange=learner.exchange,
            exact_head=learner.head == "float32",
            moments=learner.moments,
            share_prefixes=learner.share_prefixes,
            lora=Lora(lora.rank, lora.alpha, tuple(lora.targets), lora.publish == "adapter") if lora.rank else None,
        )
        return TorchTrainer(model, own)

    def memory_lines(self, config: Config, base: Path) -> Iterator[str]:
        from asyncrl.training.torch.memory import memory_lines

        yield from memory_lines(config, base)


KIND = Torch()
