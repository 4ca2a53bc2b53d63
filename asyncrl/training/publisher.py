"""Publication of what a trainer makes: versions, checkpoints, models, copied away and written beside its next steps."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from asyncrl.training.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from asyncrl.training.protocol import Copied, NonFiniteWeights, Trainer
from asyncrl.weights.delta import Base, encode
from asyncrl.weights.directories import remove_directory, written_aside
from asyncrl.weights.files import write_model
from asyncrl.weights.folders import DiskFolder
from asyncrl.weights.store import WeightStore
from asyncrl.weights.tensors import digest_of, first_not_finite, manifest_of, write_tensors
from topics.weights import WeightsPublished

_WORTH = 0.9  # share of the bytes of a full version from which on no difference is written


class Publisher:
    """Copies of a trainer's weights and state, and the files that are made of them.

    The trainer may step as soon as a copy returns. What is written from a copy must be done before the next copy of its
    kind; copies of weights and of state do not touch one another.
    """

    def __init__(self, trainer: Trainer, *, store: WeightStore, checkpoints: Path, run: str = "") -> None:
        """
        Args:
            store: of the versions.
            checkpoints: folder of the checkpoints.
            run: its id, where versions may be differences to the one before, whose weights are kept for that.
        """
        self._run = run
        self._base = Base()
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

    def publish(self, *, lineage: int, version: int, base: str = "") -> WeightsPublished:
        """Write the copied weights into the weight store.

        Args:
            base: key of a version; where it is the newest that was written here, the difference to it is written, if
                that is smaller.

        Raises:
            NonFiniteWeights: a tensor holds values that are not finite; nothing is written.
            CheckpointError: the disk refused it; nothing is left behind.
        """
        files = self._weights.files()
        wrong = first_not_finite(files)
        if wrong:
            raise NonFiniteWeights(f"version {version}: tensor {wrong} holds values that are not finite")
        size, choice, began = sum(t.content.nbytes for tensors in files.values() for t in tensors), "", time.monotonic()
        delta = None
        if base and base == self._base.key and size:
            delta = encode(self._base.files, files)
            moved = sum(map(len, delta.frames))
            choice = f"full: the difference has {moved / size:.0%} of its bytes"
            if moved > _WORTH * size:
                delta = None
        elif self._run:
            choice = "full: no base" if base else "full"
        encoded = time.monotonic()
        if delta is not None:
            message = self._store.publish_delta(delta, run=self._run, base=base, lineage=lineage, version=version)
            size, choice = moved, f"difference: {sum(one.changed for one in delta.tensors)} elements changed"
        else:
            message = self._store.publish(files, self._trainer.source, lineage=lineage, version=version)
        if self._run:
            self._base.keep(message.key, files)
        written = time.monotonic()
        seconds = {"encode_s": round(encoded - began, 4), "write_s": round(written - encoded, 4)}
        return msgspec.structs.replace(message, bytes=size, choice=choice, **seconds)

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
