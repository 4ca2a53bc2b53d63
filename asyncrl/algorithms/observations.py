"""Cross-entropy on observations: the policy also learns to predict what its environment answers.

Observations are the tokens of a row that follow its first sampled token and that the policy did not sample: results of
tools, messages of a simulated user, and the template around them. Their weights are those of the sampled tokens of
their trajectory.

Source: ECHO, arXiv 2605.24517, which divides the cross-entropy of a rollout by its observations instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from asyncrl.algorithms.rows import TrainRow

OBSERVED = "observed"
"""Column of the weights of observations, 0 at all other tokens."""


def with_observations(rows: Sequence[TrainRow]) -> list[TrainRow]:
    """Rows whose observations are scored, too. Their weight is in the column `observed`, and 0 among other weights."""
    return [_with_observations(row) for row in rows]


def _with_observations(row: TrainRow) -> TrainRow:
    sampled = row.versions >= 0
    observed = ~sampled & (np.cumsum(sampled) > 0)
    return replace(
        row,
        mask=np.where(observed, 1, row.mask).astype(np.uint8),
        weights=np.where(observed, 0.0, row.weights).astype(np.float32),
        columns={**row.columns, OBSERVED: np.where(observed, row.weights, 0.0).astype(np.float32)},
    )
