"""The trainer protocol: what a learner requires of a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from asyncrl.algorithms.rows import TrainRow
from asyncrl.errors import AsyncRLError
from asyncrl.training.anomalies import Usual
from asyncrl.weights.adapters import PublishedAdapter
from asyncrl.weights.tensors import Files
from topics.batches import Anomaly, Objective


class NonFiniteLoss(AsyncRLError):
    """A loss or gradient norm that is no number. Raised before the weights are touched."""


class NonFiniteWeights(AsyncRLError):
    """Weights that are no numbers, and must not reach an engine."""


class RowError(AsyncRLError):
    """A row that the model cannot be trained on."""


class Copied(Protocol):
    """Tensors that are on their way to host memory."""

    def files(self) -> Files:
        """Wait for the copies and return those that this rank writes: each tensor is written by one rank.

        With several ranks the stems are those of `stem_of_share`.
        """

    def shared(self) -> list[bytes]:
        """Wait for the copies and return those of this rank for other processes of the host, if it shares them.

        By the call in which a server gets them: see `asyncrl.weights.shared`.
        """


class Offloaded(NamedTuple):
    """Bytes that have left a device, and the seconds that they took."""

    bytes: int  # that are in host memory instead
    wait_s: float = 0.0  # until the step and the copies before had ended, and all had its place in host memory
    copy_s: float = 0.0  # until the copy had ended, and its source was no longer held
    free_s: float = 0.0  # until other processes could have the memory
    copied: int = 0  # bytes that were not in host memory anyway, as the published weights are
    left: int = 0  # bytes of the device that the process's allocator still has


class Trainer(Protocol):
    """Weights, an optimiser, and how to move one by the other.

    With several ranks every rank makes every call; each gives `step` its own rows of the batch.
    """

    source: Path | None  # model directory whose configuration and tokenizer belong to the weights
    config: bytes | None  # `config.json` of published weights, if it differs from the directory's
    anomaly: Anomaly | None  # of the newest step
    beside_state: Mapping[str, bytes]  # further files of a checkpoint, by name
    adapter: PublishedAdapter | None  # what makes adapters of versions; None: they are whole models

    def compile_for(self, objective: Objective) -> None:
        """Compile what steps of an objective run, for rows of any length. Weights and optimiser stay as they are."""

    def step(self, rows: Sequence[TrainRow], objective: Objective, usual: Usual | None = None) -> dict[str, float]:
        """Make one update and return its metrics. The same rows and state give the same bits.

        Args:
            usual: the range out of which the step is an anomaly, whose trajectories are then looked for.

        Raises:
            NonFiniteLoss: the loss or the gradient is not finite; weights and optimiser are as before.
            RowError: a row is longer than the model's context, holds a token outside its vocabulary, or lacks a column.
            AlgorithmError: the objective names something unknown here.
        """

    def copy_weights(self, *, whole: bool = False) -> Copied:
        """Copy every tensor in published form, by its Hugging Face name, tied ones once.

        The next step may begin at once. The copies do not change until the next call.

        Args:
            whole: copy a whole model, also where versions are adapters.

        Raises:
            CheckpointError: versions are adapters, and the weights that they are added to are not those of `source`.
        """

    def copy_state(self) -> Copied:
        """Copy weights, optimiser and RNG away, as `copy_weights` does."""

    def rest(self) -> Offloaded:
        """Move weights and optimiser off the device until the next call of any other kind."""

    def load(self, directory: Path) -> None:
        """Continue from the files of a `copy_state`.

        Raises:
            CheckpointError: when the files are missing, or cannot be read.
            OtherModel: when they belong to another model.
        """
