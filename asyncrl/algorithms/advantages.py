"""From rewards to advantages.

An estimator is a function of the rewards of all groups of a batch that name it, so that it may compare the members of
a group or all of these groups; one that needs more than rewards has a second function, of a row with named columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncrl.algorithms import gdpo
from asyncrl.algorithms.gae import gae_of_row, returns_of_row
from asyncrl.algorithms.hindsight import HINDSIGHT, hindsight_of_row
from asyncrl.algorithms.named import AlgorithmError, Table, guarded, named, numbers
from asyncrl.algorithms.rows import TrainRow
from asyncrl.algorithms.turn_returns import turn_advantages
from topics.batches import Objective
from topics.wire import Float32Array

Values: TypeAlias = npt.NDArray[np.float64]

_STD_FLOOR = 1e-6
_GREATEST = np.finfo(np.float32).max


class Estimator(NamedTuple):
    """An estimator of advantages."""

    of_groups: Callable[[Sequence[Values]], list[Values]]  # rewards [G] of each group to advantages [G] of each
    compares: bool = True  # members of a group: a group of one, or of equal rewards, has no advantage
    # A row with `needs` and those advantages, and the objective of its step, to advantages [T].
    of_row: Callable[[TrainRow, Objective], Float32Array] | None = None
    needs: tuple[str, ...] = ()  # columns that `of_row` reads
    # Rewards and trainable tokens [G] of each group to advantages; without it these are `of_groups`.
    of_lengths: Callable[[Sequence[Values], Sequence[Values]], list[Values]] | None = None
    # Rewards of the turns of each member of a group, and `Objective.turn_discount`, to advantages of these turns.
    of_turns: Callable[[Sequence[Sequence[float]], float], list[Values]] | None = None
    # Rewards [G, K] of the kinds in `Objective.reward_weights`, and their weights [K], to advantages [G] of each group.
    of_kinds: Callable[[Sequence[Values], Sequence[float]], list[Values]] | None = None


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


def zero(groups: Sequence[Values]) -> list[Values]:
    """No advantage from rewards: that of tokens is in the penalties alone, as in on-policy distillation."""
    return [np.zeros_like(group) for group in groups]


def leave_one_out(groups: Sequence[Values]) -> list[Values]:
    """Subtract the mean reward of the other members of the group.

    Source: RLOO, arXiv 2402.14740, section 2.2.
    """
    return [
        values * (group.size / (group.size - 1)) if values.any() else values
        for group, values in zip(groups, center(groups), strict=True)
    ]


def reinforce_pp(groups: Sequence[Values]) -> list[Values]:
    """Center on the mean of all trajectories and divide by their unbiased standard deviation + 1e-6.

    Source: REINFORCE++, arXiv 2501.03262, section 3; without a reward penalty all tokens of a trajectory have one
    advantage, and a trajectory counts once for any length.
    """
    rewards = np.concatenate(groups) if groups else np.zeros(0)
    if rewards.size < 2 or (rewards == rewards[0]).all():
        return [np.zeros_like(group) for group in groups]
    return [(group - rewards.mean()) / (rewards.std(ddof=1) + _STD_FLOOR) for group in groups]


def reinforce_pp_baseline(groups: Sequence[Values]) -> list[Values]:
    """Center on the group mean and divide by the standard deviation of that over all trajectories + 1e-6.

    Source: REINFORCE++-baseline, arXiv 2501.03262, section 3.
    """
    centered = center(groups)
    values = np.concatenate(centered) if centered else np.zeros(0)
    return [group / (values.std(ddof=1) + _STD_FLOOR) for group in centered] if values.any() else centered


def max_rl(groups: Sequence[Values]) -> list[Values]:
    """Center on the group mean and divide by it; no advantage where it is not positive.

    Source: MaxRL, arXiv 2602.02710, whose numbers of equations were not verified; for rewards from 0 on.
    """
    return [
        values / group.mean() if values.any() and group.mean() > 0.0 else np.zeros_like(values)
        for group, values in zip(groups, center(groups), strict=True)
    ]


def optimal_baseline(groups: Sequence[Values], lengths: Sequence[Values]) -> list[Values]:
    """Subtract the mean reward of the group, in which each trajectory counts by its trainable tokens.

    Source: OPO, arXiv 2505.23585, as in verl; of groups of equal rewards see `center`.
    """
    return [
        group - (group * counts).sum() / counts.sum() if values.any() and counts.sum() else values
        for group, counts, values in zip(groups, lengths, center(groups), strict=True)
    ]


def less_others(groups: Sequence[Values]) -> list[Values]:
    """Subtract the mean reward of the other groups, each of which counts once; without another subtract nothing.

    For groups of one, such as turns of live traffic. Source: the leave-one-out baseline of RLOO (arXiv 2402.14740,
    section 2.2) over the groups of a batch instead of the members of a group.
    """
    if len(groups) < 2:
        return list(groups)
    means = [float(group.mean()) for group in groups]
    total = math.fsum(means)
    return [group - (total - mean) / (len(groups) - 1) for group, mean in zip(groups, means, strict=True)]


def _of_user(found: Any) -> Estimator:
    """A function from the rewards of groups to their advantages."""
    if isinstance(found, type):
        raise TypeError("it is a class, expected a function of the rewards of groups")

    @guarded
    @wraps(found)
    def given(groups: Sequence[Values]) -> list[Values]:
        return [numbers(group, np.float64) for group in found([group.copy() for group in groups])]

    def of_groups(groups: Sequence[Values]) -> list[Values]:
        try:
            values = given(groups)
        except AlgorithmError as error:
            raise AlgorithmError(f"{error}\nit gets a list of arrays, the rewards [members] of each group") from error
        wanted, shapes = [group.shape for group in groups], [group.shape for group in values]
        if shapes != wanted:
            raise AlgorithmError(f"an advantage of shapes {shapes} for rewards of {wanted}; it is one number a member")
        if not all((np.abs(group) <= _GREATEST).all() for group in values):
            given_as = [group.tolist() for group in values]
            raise AlgorithmError(f"advantages {given_as}; each must be a finite number, in float32, too")
        return values

    return Estimator(of_groups, compares=False)


_BUILT_IN = {
    "grpo": Estimator(grpo),
    "centered": Estimator(center),
    "rloo": Estimator(leave_one_out),
    "reinforce_pp": Estimator(reinforce_pp, compares=False),
    "reinforce_pp_baseline": Estimator(reinforce_pp_baseline),
    "max_rl": Estimator(max_rl),
    "opo": Estimator(center, of_lengths=optimal_baseline),
    "gdpo": Estimator(gdpo.of_one_reward, of_kinds=gdpo.decoupled),
    "turns": Estimator(grpo, of_turns=turn_advantages),
    "none": Estimator(list, compares=False),
    "less_others": Estimator(less_others, compares=False),
    "returns": Estimator(list, compares=False, of_row=returns_of_row),
    "gae": Estimator(list, compares=False, of_row=gae_of_row, needs=("values",)),
    "zero": Estimator(zero, compares=False),
    "hindsight": Estimator(zero, compares=False, of_row=hindsight_of_row, needs=(HINDSIGHT,)),
    "combine": Estimator(list, compares=False, of_row=hindsight_of_row, needs=(HINDSIGHT,)),
    "combine_rloo": Estimator(leave_one_out, of_row=hindsight_of_row, needs=(HINDSIGHT,)),
    "combine_less_others": Estimator(less_others, compares=False, of_row=hindsight_of_row, needs=(HINDSIGHT,)),
}
ADVANTAGES = Table(_BUILT_IN, _of_user)
"""Estimators by their name in `learner.advantage`."""


def group_advantages(
    groups: Sequence[npt.ArrayLike], estimators: Sequence[str], lengths: Sequence[Sequence[int]] = ()
) -> list[Values]:
    """Advantages of the trajectories of a batch.

    Args:
        groups: per prompt, the rewards [G] of its graded trajectories.
        estimators: per prompt, a name in `ADVANTAGES`.
        lengths: per prompt, [G] trainable tokens of each; left out, all have as many.

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
        estimator, chosen = named(ADVANTAGES, name, "advantage"), [rewards[place] for place in places]
        if estimator.of_lengths is not None and lengths:
            advantages = estimator.of_lengths(chosen, [np.asarray(lengths[place], np.float64) for place in places])
        else:
            advantages = estimator.of_groups(chosen)
        found.update(zip(places, advantages, strict=True))
    return [found[place] for place in range(len(rewards))]
