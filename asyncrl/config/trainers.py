"""The description of the kinds of trainers."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from asyncrl.config.finding import Finding
from asyncrl.config.learner_settings import DOCUMENTED_TRAINERS
from asyncrl.config.settings import Config, LearnerSettings

if TYPE_CHECKING:
    from asyncrl.training.protocol import Trainer


class TrainerCapability(StrEnum):
    """Something that trainers of a kind can do. Core code asks for a capability, never for the name of a kind."""

    MODEL = "model"  # steps change the tensors of a model in the memory of `learner.device`
    PROCESSES = "processes"  # each rank is a process; else the only rank is in the process of the learner
    FP8 = "fp8"  # layers multiply in FP8
    PADS = "pads"  # documents that a model cannot take in one row are padded rows
    LIVE = "live"  # they learn from the hints of judges, and measure the KL of live turns from the reference


class TrainerKind:
    """A kind of trainers: what they can do, and what their settings need.

    Configs load these descriptions: a method imports what takes long to load itself.
    """

    capabilities: ClassVar[frozenset[TrainerCapability]] = frozenset()
    settings: ClassVar[frozenset[str]] = frozenset()  # of `LearnerSettings`, which not all kinds have

    def can(self, capability: TrainerCapability) -> bool:
        """Return whether trainers of this kind have a capability."""
        return capability in self.capabilities

    def open(self, _config: Config, _model: Path, _base: Path) -> Trainer:
        """Open the trainer of a config; `_model` is the directory of the model as it was before the run."""
        raise NotImplementedError

    def checks(self, _learner: LearnerSettings) -> Iterator[Finding]:
        """Find settings that contradict others with trainers of this kind."""
        yield from ()

    def preflight(self, _config: Config, _base: Path) -> Iterator[Finding]:
        """Find what this machine lacks, and models that such trainers cannot train."""
        yield from ()

    def memory_lines(self, _config: Config, _base: Path) -> Iterator[str]:
        """Estimate the memory of a rank."""
        yield from ()


@cache
def trainer_kind(name: str) -> TrainerKind:
    """The kind of a name."""
    kind: TrainerKind = import_module(f"asyncrl.training.{name}.kind").KIND
    return kind


def trainers_with(one: str) -> str:
    """The names of the documented kinds that have a capability or one of the `settings`, as messages name them."""
    kinds = {name: trainer_kind(name) for name in DOCUMENTED_TRAINERS}
    return " or ".join(f'"{name}"' for name, kind in kinds.items() if one in kind.capabilities | kind.settings)
