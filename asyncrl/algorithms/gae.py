"""Advantages of single tokens from the values of a critic."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from asyncrl.algorithms.rows import TrainRow
from topics.batches import CriticStep, Objective
from topics.wire import Float32Array

Values: TypeAlias = npt.NDArray[np.float64]


def gae_of_row(row: TrainRow, objective: Objective) -> Float32Array:
    """Advantages of the trained tokens of a row: each is an action, the text before it the state.

    The reward of a token is its penalty; the last trained token also has the reward of the trajectory. Tokens that
    are not trained, as those of a tool, are no actions: the state after an action is that before the next one. Each
    segment is a separate episode with the reward of its trajectory at its end.

    Args:
        row: with the column `values`, of the state before each token, and the trajectory's reward as advantages.
        objective: with the settings of the critic.

    Returns:
        [T], 0 outside the mask.
    """
    actions, critic = np.flatnonzero(row.mask), objective.critic or CriticStep()
    values = row.columns["values"][actions].astype(np.float64)
    found = gae(_rewards(row, actions), values, discount=critic.discount, decay=critic.gae_lambda)
    return _at(actions, found, len(row.mask))


def returns_of_row(row: TrainRow, _objective: Objective) -> Float32Array:
    """Rewards to come of the trained tokens of a row, without a critic: rewards and actions as in `gae_of_row`.

    Source: REINFORCE++, arXiv 2501.03262, section 3: the trajectory's reward less the sum of the penalties from the
    token on, which is whitened over the batch.
    """
    actions = np.flatnonzero(row.mask)
    return _at(actions, discounted_sums(_rewards(row, actions), 1.0), len(row.mask))


def _rewards(row: TrainRow, actions: npt.NDArray[np.intp]) -> Values:
    rewards = np.zeros(len(actions))
    if "penalty" in row.columns:
        rewards += row.columns["penalty"][actions]
    rewards[-1] += row.advantages[-1]
    return rewards


def _at(actions: npt.NDArray[np.intp], values: Values, tokens: int) -> Float32Array:
    found = np.zeros(tokens, np.float32)
    found[actions] = values
    return found


def gae(rewards: Values, values: Values, *, discount: float, decay: float) -> Values:
    """Generalised advantage estimates of an episode that ends after its last action.

    delta_t = r_t + discount V_(t+1) - V_t, where V is 0 after the end, and A_t is the sum over l of
    (discount decay)^l delta_(t+l).

    Args:
        rewards: [N] of each action.
        values: [N] of the state before each action.
        discount: gamma.
        decay: lambda.

    Returns:
        [N] advantages; the returns that values are trained on are A_t + V_t.

    Source: GAE, arXiv 1506.02438, eq. 12 and 16.
    """
    following = np.append(values[1:], 0.0)
    return discounted_sums(rewards + discount * following - values, discount * decay)


def discounted_sums(values: Values, factor: float) -> Values:
    """Sums over l of factor^l x_(t+l), [N], in log2 N additions of whole arrays."""
    total, shift = values.copy(), 1
    while shift < len(total):
        total[:-shift] += factor**shift * total[shift:]
        shift *= 2
    return total
