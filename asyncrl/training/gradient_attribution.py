"""The rows that carry the gradient of a batch, found by separate passes after a step that requests them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from asyncrl.algorithms.rows import TrainRow, weightless
from asyncrl.algorithms.sums import Sums
from asyncrl.algorithms.token_loss import Loss, Tokens
from asyncrl.training.passes import Passes
from topics.batches import Carrier

_TRIED = 16  # rows whose own gradient is computed
_NAMED = 8
_OF_MODEL = ("entropy", "outcomes")  # columns with a gradient, in addition to the log-probs
_SHARE = 0.1  # of the largest gradient, from which on a row is named

Inputs: TypeAlias = Callable[[Sequence[TrainRow], Loss], tuple[torch.Tensor, torch.Tensor, Tokens]]
"""From rows to log-probs and entropies, [N] each, and what else a loss reads."""
Gradient: TypeAlias = Callable[[list[list[TrainRow]], Loss], tuple[Sums, float]]
"""From micro-batches, equally many on every rank, to their sums and the norm of the resulting gradient."""


class _Suspect(NamedTuple):
    """A row of some rank."""

    pull: float  # sum over its tokens of |d loss / d log-prob|
    rank: int
    row: int  # its place among the rows of its rank
    trajectory_id: str


class RowPasses(NamedTuple):
    """Passes of single rows through a model. Every rank takes part with its own rows, and finds the same."""

    passes: Passes
    inputs: Inputs
    gradient: Gradient

    def carriers(self, rows: Sequence[TrainRow], loss: Loss, *, finite: bool) -> list[Carrier]:
        """Compute loss and gradient norm of the rows that pull most at their log-probs, each alone.

        One forward pass over the batch finds the order, and one pass for each of the first 16 follows.

        Args:
            rows: with the columns that the loss needs.
            finite: whether the gradient of the batch is. If not, others are tried until one is found that is not.

        Returns:
            One for each row that was tried, the largest gradient first; those that are not finite before all others.
        """
        found: list[Carrier] = []
        for number, suspect in enumerate(self._suspects(rows, loss)):
            if number >= _TRIED and (finite or not all(map(is_finite, found))):
                break
            row = rows[suspect.row] if suspect.rank == self.passes.rank else weightless(loss.needs)
            sums, norm = self.gradient([[row]], loss)
            found.append(Carrier(suspect.trajectory_id, float(sums["loss"]), norm))
        return sorted(found, key=lambda carrier: (is_finite(carrier), -carrier.grad_norm))

    def _suspects(self, rows: Sequence[TrainRow], loss: Loss) -> list[_Suspect]:
        """The rows of all ranks, the most suspicious first."""
        pulls: dict[int, float] = {}  # by the id of the row
        for batch in self.passes.even(self.passes.cut(rows), loss.needs):
            pulls |= zip(map(id, batch), self._pulls(batch, loss).tolist(), strict=True)
        own = [_Suspect(pulls[id(row)], self.passes.rank, index, row.trajectory_id) for index, row in enumerate(rows)]
        # Values that are no numbers come first; ties fall by rank and place, so that all ranks find one order.
        return sorted(
            (suspect for part in self.passes.of_all(own) for suspect in part),
            key=lambda suspect: (-suspect.pull if math.isfinite(suspect.pull) else -math.inf, suspect[1:3]),
        )

    def _pulls(self, batch: Sequence[TrainRow], loss: Loss) -> torch.Tensor:
        """Sum of |d loss / d log-prob| over the tokens of each row; no gradient goes through the model."""
        with torch.no_grad():
            logprobs, _, tokens = self.inputs(batch, loss)
        leaves = {name: tokens.columns[name].requires_grad_() for name in _OF_MODEL if name in tokens.columns}
        total, _ = loss(logprobs.requires_grad_(), tokens._replace(columns={**tokens.columns, **leaves}))
        parts = torch.autograd.grad(total, [logprobs, *leaves.values()], allow_unused=True)
        pull = torch.stack(
            [part.abs().flatten(1).sum(1) if part.ndim > 1 else part.abs() for part in parts if part is not None]
        )
        return pull.new_zeros(len(batch)).index_add(0, tokens.rows, pull.sum(0))


def largest_carriers(carriers: Sequence[Carrier]) -> list[Carrier]:
    """Of each trajectory its first, without those whose gradient is less than a tenth of the first one's."""
    of_each = {carrier.trajectory_id: carrier for carrier in reversed(carriers)}
    order = [of_each[name] for name in dict.fromkeys(carrier.trajectory_id for carrier in carriers)]
    return [carrier for carrier in order if carrier.grad_norm >= _SHARE * order[0].grad_norm][:_NAMED]


def is_finite(carrier: Carrier) -> bool:
    """Return whether loss and gradient of a row are numbers."""
    return math.isfinite(carrier.loss) and math.isfinite(carrier.grad_norm)
