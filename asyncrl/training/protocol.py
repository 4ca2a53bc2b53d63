"""The trainer protocol: what a learner requires of a trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from asyncrl.algorithms.batches import TrainRow
from asyncrl.algorithms.losses import Correction
from asyncrl.errors import AsyncRLError

if TYPE_CHECKING:
    import torch

LossName: TypeAlias = Literal["sft", "grpo"]


@dataclass(frozen=True, slots=True)
class StepSpec:
    """The objective of one optimiser step."""

    step: int
    loss: LossName
    learning_rate: float
    clip: tuple[float, float] = (0.2, 0.28)  # (low, high) around a ratio of 1
    correction: Correction = field(default_factory=Correction)
    grad_clip: float = 1.0  # largest norm of the gradient


class NonFiniteLoss(AsyncRLError):
    """A loss or gradient norm that is no number. Raised before the weights are touched."""


class RowError(AsyncRLError):
    """A row that the model cannot be trained on."""


class Trainer(Protocol):
    """Weights, an optimiser, and how to move one by the other.

    With several ranks every rank makes every call; each gives `step` its own rows of the batch.
    """

    def step(self, rows: Sequence[TrainRow], spec: StepSpec) -> dict[str, float]:
        """Make one update and return its metrics. The same rows and state give the same bits.

        Raises:
            NonFiniteLoss: the loss or the gradient is not finite; weights and optimiser are as before.
            RowError: a row is longer than the model's context, or holds a token outside its vocabulary.
        """
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by its Hugging Face name, tied ones once. Valid until the next `step` or `load`."""
        ...

    def save(self, directory: Path) -> None:
        """Write weights, optimiser and RNG into an existing directory."""
        ...

    def load(self, directory: Path) -> None:
        """Continue from what `save` wrote.

        Raises:
            CheckpointError: when the files are missing or belong to another model.
        """
        ...

    def export(self, directory: Path) -> None:
        """Fill an existing directory with a Hugging Face model and its tokenizer, which no program has to convert."""
        ...
