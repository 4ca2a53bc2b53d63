"""The form of all losses: a weighted sum over the trained tokens of a micro-batch.

The weights come from `aggregation`, so losses and gradients of micro-batches and ranks add up to those of the batch.
Figures are returned as sums for the same reason (`asyncrl/algorithms/sums.py`). All mathematics is float32.

Config readers load these classes for their options; torch itself is loaded where tensors are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

import msgspec

if TYPE_CHECKING:
    import torch

    Sums: TypeAlias = dict[str, torch.Tensor]


class Tokens(NamedTuple):
    """The inputs of a loss for each of N trained tokens, row by row in the order of the row."""

    behaviour: torch.Tensor  # [N] natural log of the sampler's probability
    advantages: torch.Tensor  # [N]
    weights: torch.Tensor  # [N] from `aggregation`
    rows: torch.Tensor  # [N] number of the token's row in the micro-batch, from 0
    columns: dict[str, torch.Tensor]  # [N] each: those that the loss needs


class Loss(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A loss on tokens. Its fields are its options, `learner.loss_options.NAME`, each with a range and a sentence."""

    uses_advantages: ClassVar[bool] = True
    """True where a row whose advantages are all 0 has no gradient, and needs no forward pass."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns of `Tokens` that it reads, such as `proximal`."""
        return ()

    def __call__(self, logprobs: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, Sums]:
        """Compute the loss.

        Args:
            logprobs: [N] natural log of the trainer's probability of each token.
            tokens: the rest of what is known of them. One of weight 0 has no effect.

        Returns:
            The summed loss, and sums for `metrics`.
        """
        raise NotImplementedError
