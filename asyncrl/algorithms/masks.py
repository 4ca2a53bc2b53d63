"""Masks: tokens that are too far from the policy that sampled them for a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from asyncrl.algorithms.named import named
from asyncrl.algorithms.sequences import geometric, product, row_means

if TYPE_CHECKING:
    import torch

    from asyncrl.algorithms.rows import TrainRow
    from asyncrl.algorithms.token_loss import Gathered, Tokens
    from topics.wire import Float32Array

SECOND_MOMENT = "m2po"
"""Column of the tokens that this mask names."""


class MaskBounds(NamedTuple):
    """The bounds of each mask; the options of a policy loss have the same names."""

    sequence: tuple[float, float]  # of the ratio trainer/sampler of a row
    opsm_cap: float  # nats by which a row with a negative advantage may have become less likely, per token
    max_in_queue_lag: int
    max_in_flight_lag: int


Mask: TypeAlias = "Callable[[torch.Tensor, Tokens, MaskBounds], torch.Tensor]"
"""Log ratio trainer/sampler [N], without gradient, tokens, bounds, to the tokens without a gradient [N]."""


def _outside(ratio: torch.Tensor, bounds: tuple[float, float]) -> torch.Tensor:
    return (ratio < bounds[0]) | (ratio > bounds[1])


def sequence_geometric(log_ratio: torch.Tensor, tokens: Tokens, bounds: MaskBounds) -> torch.Tensor:
    """Rows whose geometric mean ratio is out of its bounds: sequence rejection, as in AReaL and verl."""
    return _outside(geometric(log_ratio, tokens), bounds.sequence)


def sequence_product(log_ratio: torch.Tensor, tokens: Tokens, bounds: MaskBounds) -> torch.Tensor:
    """Rows whose product of ratios, that of the whole row, is out of its bounds, as in verl."""
    return _outside(product(log_ratio, tokens), bounds.sequence)


def second_moment(log_ratio: torch.Tensor, tokens: Tokens, bounds: MaskBounds) -> torch.Tensor:
    """Tokens that `second_moments` names over the whole batch, before the update."""
    return tokens.columns[SECOND_MOMENT] > 0


def second_moments(rows: Sequence[TrainRow], gathered: Gathered, *, cap: float) -> list[Float32Array]:
    """Name the tokens with the largest squared log ratios, until the mean over those left of the batch is within `cap`.

    The ratio is that of the trainer before the update and the sampler. Equal values are named together, so that the
    result does not depend on the order of tokens.

    Args:
        rows: of this rank, with the column `proximal`.
        gathered: from values of this rank to those of all ranks.

    Returns:
        [T] for each row: 1 where the token is named.

    Source: M2PO, arXiv 2510.01161, algorithm 1.
    """
    squares = [np.square(row.columns["proximal"].astype(np.float64) - row.logprobs) for row in rows]
    trained = [(row.mask != 0) & (row.weights > 0) for row in rows]
    own = [values[where] for values, where in zip(squares, trained, strict=True)]
    ordered = np.sort(gathered(np.concatenate([np.zeros(0), *own])))
    within = np.cumsum(ordered) <= cap * np.arange(1, len(ordered) + 1)  # of the means, which rise
    last = np.append(ordered, np.inf)[1:] > ordered  # of equal values
    bound = ordered[within & last].max(initial=-1.0)
    return [((values > bound) & where).astype(np.float32) for values, where in zip(squares, trained, strict=True)]


def off_policy_sequence(log_ratio: torch.Tensor, tokens: Tokens, bounds: MaskBounds) -> torch.Tensor:
    """Tokens with a negative advantage in rows that became too unlikely since they were sampled.

    Source: off-policy sequence masking of DeepSeek-V3.2, arXiv 2512.02556, section 3.1.
    """
    return (tokens.advantages < 0) & (row_means(-log_ratio, tokens) > bounds.opsm_cap)


def in_queue(log_ratio: torch.Tensor, tokens: Tokens, bounds: MaskBounds) -> torch.Tensor:
    """Rows whose newest token is older than that many versions."""
    return tokens.in_queue > bounds.max_in_queue_lag


def in_flight(log_ratio: torch.Tensor, tokens: Tokens, bounds: MaskBounds) -> torch.Tensor:
    """Tokens that more updates than that followed before their row ended."""
    return tokens.in_flight > bounds.max_in_flight_lag


MASKS: dict[str, Mask] = {
    "geometric": sequence_geometric,
    "product": sequence_product,
    "m2po": second_moment,
    "opsm": off_policy_sequence,
    "in_queue": in_queue,
    "in_flight": in_flight,
}
"""Masks by their name in `learner.loss_options.masks`."""


def masked_by(masks: Sequence[str], log_ratio: torch.Tensor, tokens: Tokens, bounds: MaskBounds) -> torch.Tensor:
    """Tokens that one of some masks names, [N].

    Raises:
        AlgorithmError: there is no such mask.
    """
    masked = tokens.weights < 0
    for name in masks:
        masked = masked | named(MASKS, name, "mask")(log_ratio, tokens, bounds)
    return masked
