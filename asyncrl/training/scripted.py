"""A trainer that takes its time and changes nothing, for benchmarks of everything around it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.algorithms.batches import TrainRow
from asyncrl.training.protocol import StepSpec

if TYPE_CHECKING:
    import torch


class ScriptedTrainer:
    """See `Trainer`."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._never = threading.Event()

    def step(self, rows: Sequence[TrainRow], spec: StepSpec) -> dict[str, float]:
        """Take the scripted time."""
        if self._step_s:
            self._never.wait(self._step_s)
        return {"loss": 0.0}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """None."""
        return iter(())

    def save(self, directory: Path) -> None:
        """Nothing to save."""

    def load(self, directory: Path) -> None:
        """Nothing to load."""

    def export(self, directory: Path) -> None:
        """Nothing to write."""
