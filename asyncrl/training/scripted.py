"""A trainer that takes its time and changes nothing, for benchmarks of everything around it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from asyncrl.algorithms.rows import TrainRow
from asyncrl.weights.tensors import Files
from topics.batches import Objective


class ScriptedTrainer:
    """See `Trainer`."""

    source: Path | None = None

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._never = threading.Event()

    def step(self, rows: Sequence[TrainRow], objective: Objective) -> dict[str, float]:
        """Take the scripted time."""
        if self._step_s:
            self._never.wait(self._step_s)
        return {"loss": 0.0}

    def copy_weights(self) -> ScriptedTrainer:
        """Copy none."""
        return self

    def copy_state(self) -> ScriptedTrainer:
        """Copy nothing."""
        return self

    def files(self) -> Files:
        """No tensors."""
        return {}

    def load(self, directory: Path) -> None:
        """Load nothing."""
