"""Advantages of several rewards, each of which is normalised over the group before they are added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Values: TypeAlias = npt.NDArray[np.float64]

_STD_FLOOR = 1e-6


def decoupled(groups: Sequence[Values], weights: Sequence[float]) -> list[Values]:
    """Normalise each reward over its group, add them by their weights, and normalise the sums over the batch.

    With r_k the rewards of kind k of a group, the sum of a member is A = sum over k of w_k (r_k - mean) / (std + 1e-6),
    and its advantage A / (std + 1e-6), with the deviation of all members of all groups, whose mean is 0. Deviations are
    unbiased. A kind whose rewards are equal in a group adds nothing there.

    Args:
        groups: rewards [G, K] of each group.
        weights: [K] of the kinds of rewards.

    Returns:
        [G] for each group.

    Source: GDPO, arXiv 2601.05242: groups first, each reward alone, then the batch.
    """
    added = [_normalised(group) @ np.asarray(weights, dtype=np.float64) for group in groups]
    every = np.concatenate(added) if added else np.zeros(0)
    if every.size < 2 or (every == every[0]).all():
        return [np.zeros_like(one) for one in added]
    return [one / (every.std(ddof=1) + _STD_FLOOR) for one in added]  # the mean of each group is 0


def _normalised(rewards: Values) -> Values:
    """Center each column on its mean, and divide it by its deviation; a column of equal rewards becomes 0."""
    found = np.zeros_like(rewards)
    for kind, column in enumerate(rewards.T):
        if column.size > 1 and (column != column[0]).any():
            found[:, kind] = (column - column.mean()) / (column.std(ddof=1) + _STD_FLOOR)
    return found


def of_one_reward(groups: Sequence[Values]) -> list[Values]:
    """Treat the reward [G] of each group as its one kind."""
    return decoupled([group[:, None] for group in groups], [1.0])
