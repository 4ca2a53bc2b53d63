"""The form of all losses: a weighted sum over the trained tokens of a micro-batch.

The weights come from `aggregation`, so losses and gradients of micro-batches and ranks add up to those of the batch.
Figures are returned as sums for the same reason (`asyncrl/algorithms/sums.py`). All mathematics is float32.

Config readers load these classes for their options; torch itself is loaded where tensors are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt
    import torch

    from asyncrl.algorithms.rows import TrainRow
    from topics.wire import Float32Array

    Sums: TypeAlias = dict[str, torch.Tensor]
    Gathered: TypeAlias = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
    """From values of a rank to those of all ranks; every rank calls it."""
    OfBatch: TypeAlias = Callable[[Sequence[TrainRow], Gathered], list[Float32Array]]
    """From the rows of a rank, with the columns before, to another column of each."""


class Tokens(NamedTuple):
    """The inputs of a loss for each of N trained tokens, row by row in the order of the row."""

    behaviour: torch.Tensor  # [N] natural log of the sampler's probability
    advantages: torch.Tensor  # [N]
    weights: torch.Tensor  # [N] from `aggregation`
    rows: torch.Tensor  # [N] number of the token's row in the micro-batch, from 0 and below N
    in_queue: torch.Tensor  # [N] integers, lag of the newest token of the row
    in_flight: torch.Tensor  # [N] integers, lag of the token relative to the newest one
    columns: dict[str, torch.Tensor]  # those that the loss needs, [N] each, but for `teacher_top` and `outcomes`


class Loss(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A loss on tokens. Its fields are its options, `learner.loss_options.NAME`, each with a range and a sentence."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns of `Tokens` that it reads, such as `proximal`."""
        return ()

    @property
    def of_batch(self) -> dict[str, OfBatch]:
        """Those columns among them that follow from the others over the whole batch, before the update."""
        return {}

    @property
    def uses_advantages(self) -> bool:
        """True where a row whose advantages are all 0 has no gradient, and needs no forward pass."""
        return True

    @property
    def uses_entropy(self) -> bool:
        """True if it reads the column `entropy` (nats per token) and sends a gradient through it."""
        return False

    @property
    def top_k(self) -> int:
        """K if it reads the column `outcomes`, [N, K + 1] log-probs of the ids in `teacher_top` and of all others.

        A gradient goes through that column. Without others, where K is the vocabulary, it is [N, K].
        """
        return 0

    @property
    def idle(self) -> tuple[str, ...]:
        """Options without effect given the other values."""
        return ()

    def __call__(self, logprobs: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, Sums]:
        """Compute the loss.

        Args:
            logprobs: [N] natural log of the trainer's probability of each token.
            tokens: the other columns of the tokens. One of weight 0 has no effect.

        Returns:
            The summed loss, and sums for `metrics`.
        """
        raise NotImplementedError
