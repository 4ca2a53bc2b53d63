"""A trainer that takes its time and changes nothing, for benchmarks of everything around it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.algorithms.rows import TrainRow
from asyncrl.training.anomalies import Usual
from asyncrl.training.protocol import Offloaded
from asyncrl.weights.adapters import PublishedAdapter
from asyncrl.weights.tensors import Files, tensors_in
from topics.batches import Anomaly, Objective


class ScriptedTrainer:
    """See `Trainer`.

    Args:
        step_s: seconds that each step takes, without its tokens.
        tokens_per_s: tokens of rows in a second; 0: they take no time.
        model: directory whose weights every version has; without one, versions have no tensors.
    """

    def __init__(self, step_s: float, model: Path | None = None, *, tokens_per_s: float = 0.0) -> None:
        self.source = model
        self.config: bytes | None = None
        self.anomaly: Anomaly | None = None
        self.beside_state: Mapping[str, bytes] = {}
        self.adapter: PublishedAdapter | None = None
        self._step_s, self._tokens_per_s = step_s, tokens_per_s
        self._never = threading.Event()

    def compile_for(self, objective: Objective) -> None:
        """Compile nothing: steps compute nothing."""

    def step(self, rows: Sequence[TrainRow], objective: Objective, usual: Usual | None = None) -> dict[str, float]:
        """Take the scripted time."""
        tokens_s = sum(len(row.tokens) for row in rows) / self._tokens_per_s if self._tokens_per_s else 0.0
        if seconds := self._step_s + tokens_s:
            self._never.wait(seconds)
        return {"loss": 0.0}

    def copy_weights(self, *, whole: bool = False) -> ScriptedTrainer:
        """Copy none: they do not change."""
        return self

    def copy_state(self) -> ScriptedTrainer:
        return ScriptedTrainer(self._step_s)

    def files(self) -> Files:
        """Tensors of the model, as they lie in its files."""
        paths = sorted(self.source.glob("*.safetensors")) if self.source is not None else []
        tensors = [tensor for path in paths for tensor in tensors_in(path)]
        return {"model": tensors} if tensors else {}

    def shared(self) -> list[bytes]:
        """None: they lie in files."""
        return []

    def rest(self) -> Offloaded:
        """Nothing is on a device."""
        return Offloaded(0)

    def load(self, directory: Path) -> None:
        """Load nothing."""
