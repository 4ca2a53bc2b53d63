"""From rewards to advantages.

An estimator is a function of the rewards of all groups of a batch that name it, so that it may compare the members of
a group or all of these groups; one that needs more than rewards has a second function, of a row with named columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncrl.algorithms.named import named
from asyncrl.algorithms.rows import TrainRow
from topics.wire import Float32Array

Values: TypeAlias = npt.NDArray[np.float64]

_STD_FLOOR = 1e-6


class Estimator(NamedTuple):
    """An estimator of advantages."""

    of_groups: Callable[[Sequence[Values]], list[Values]]  # rewards [G] of each group to advantages [G] of each
    compares: bool = True  # members of a group: a group of one, or of equal rewards, has no advantage
    of_row: Callable[[TrainRow], Float32Array] | None = None  # row with `needs` and those advantages to advantages [T]
    needs: tuple[str, ...] = ()  # columns that `of_row` reads


def grpo(groups: Sequence[Values]) -> list[Values]:
    """Center on the group mean and divide by the unbiased standard deviation + 1e-6.

    Source: GRPO, arXiv 2402.03300, section 4.1.2.
    """
    centered = center(groups)
    return [
        values / (group.std(ddof=1) + _STD_FLOOR) if values.any() else values
        for group, values in zip(groups, centered, strict=True)
    ]


def center(groups: Sequence[Values]) -> list[Values]:
    """Subtract the group mean.

    Source: Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    # Equality is tested on the rewards: the mean of equal floats may differ from them by a rounding error,
    # which a division by a vanishing deviation would blow up into an advantage.
    return [
        group - group.mean() if group.size > 1 and (group != group[0]).any() else np.zeros_like(group)
        for group in groups
    ]


ADVANTAGES = {
    "grpo": Estimator(grpo),
    "centered": Estimator(center),
    "none": Estimator(list, compares=False),
}
"""Estimators by their name in `learner.advantage`."""


def group_advantages(groups: Sequence[npt.ArrayLike], estimators: Sequence[str]) -> list[Values]:
    """Advantages of the trajectories of a batch.

    Args:
        groups: per prompt, the rewards [G] of its graded trajectories.
        estimators: per prompt, a name in `ADVANTAGES`.

    Returns:
        Per prompt, [G].

    Raises:
        AlgorithmError: there is no such estimator.
        ValueError: when a reward is not finite.
    """
    rewards = [np.asarray(group, dtype=np.float64) for group in groups]
    for values in rewards:
        if not np.isfinite(values).all():
            raise ValueError(f"rewards {values.tolist()} of one group; every reward must be a finite number")
    found: dict[int, Values] = {}
    for name in dict.fromkeys(estimators):
        places = [place for place, estimator in enumerate(estimators) if estimator == name]
        advantages = named(ADVANTAGES, name, "advantage").of_groups([rewards[place] for place in places])
        found.update(zip(places, advantages, strict=True))
    return [found[place] for place in range(len(rewards))]
