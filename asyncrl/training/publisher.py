"""Publication of what a trainer makes: versions, checkpoints, models, copied away and written beside its next steps."""

from __future__ import annotations

from pathlib import Path

from asyncrl.training.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from asyncrl.training.protocol import Copied, Trainer
from asyncrl.weights.directories import remove_directory, written_aside
from asyncrl.weights.files import write_model
from asyncrl.weights.folders import DiskFolder
from asyncrl.weights.store import WeightStore
from asyncrl.weights.tensors import digest_of, manifest_of, write_tensors
from topics.weights import WeightsPublished


class Publisher:
    """Copies of a trainer's weights and state, and the files that are made of them.

    The trainer may step as soon as a copy returns. What is written from a copy must be done before the next copy of its
    kind; copies of weights and of state do not touch one another.
    """

    def __init__(self, trainer: Trainer, *, store: WeightStore, checkpoints: Path) -> None:
        """
        Args:
            store: of the versions.
            checkpoints: folder of the checkpoints.
        """
        self._trainer = trainer
        self._store = store
        self._checkpoints = checkpoints
        self._weights: Copied
        self._state: Copied

    def copy_weights(self) -> None:
        """Copy the weights away, for `digest`, `publish` and `export`."""
        self._weights = self._trainer.copy_weights()

    def copy_state(self) -> None:
        """Copy weights and optimiser away, for `save`."""
        self._state = self._trainer.copy_state()

    def digest(self) -> str:
        """Return the identity of the copied weights."""
        return digest_of(manifest_of(self._weights.files()))

    def publish(self, *, lineage: int, version: int) -> WeightsPublished:
        """Write the copied weights into the weight store.

        Raises:
            CheckpointError: the disk refused it; nothing is left behind.
        """
        source = self._trainer.source
        return self._store.publish(self._weights.files(), source, lineage=lineage, version=version)

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write the copied state as a checkpoint, and read it back; returns its directory.

        Raises:
            CheckpointError: the disk refused it; nothing is left behind.
        """
        tensors = self._state.files()
        path = write_checkpoint(
            self._checkpoints, checkpoint, lambda aside: write_tensors(DiskFolder(aside), tensors).files
        )
        read_checkpoint(path)  # what cannot be read back must not count
        return path

    def export(self, directory: Path) -> None:
        """Write the copied weights as a model; one that is there is replaced.

        Raises:
            CheckpointError: the disk refused it; nothing is left behind.
        """
        if directory.exists():  # of fewer steps, or of a learner that died before it announced it
            remove_directory(directory)
        with written_aside(directory) as aside:
            write_model(DiskFolder(aside.path), self._weights.files(), self._trainer.source)
