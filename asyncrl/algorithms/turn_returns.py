"""Advantages of the turns of a trajectory, from rewards that each turn has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from asyncrl.algorithms.gae import discounted_sums
from topics.trajectories import Segment
from topics.wire import Float32Array

Values: TypeAlias = npt.NDArray[np.float64]

_STD_FLOOR = 1e-6


def turn_advantages(members: Sequence[Sequence[float]], discount: float) -> list[Values]:
    """Returns of the turns of a group, centred on their mean and divided by their unbiased deviation + 1e-6.

    With r_j the reward of turn j of a member that has K, the return of turn k is G_k = sum over j from k to K of
    discount^(j - k) r_j, and its advantage (G_k - mean) / (std + 1e-6); mean and std are those of the returns of all
    turns of all members. Where all returns are equal, or there is one alone, all advantages are 0.

    Args:
        members: rewards [K] of the turns of each member, K at least 1.
        discount: of the reward of a turn by those before it, 0 to 1.

    Returns:
        [K] for each member.

    Raises:
        ValueError: a reward is not finite.

    Source: returns as in Sutton and Barto 2018, eq. 3.8; normalised over a group as the rewards of steps in GRPO with
    process supervision, arXiv 2402.03300, section 4.1.3 (which sums after the division, not before).
    """
    returns = [discounted_sums(np.asarray(rewards, dtype=np.float64), discount) for rewards in members]
    values = np.concatenate(returns) if returns else np.zeros(0)
    if not np.isfinite(values).all():
        raise ValueError(f"turn rewards {[list(rewards) for rewards in members]}; every reward must be a finite number")
    if values.size < 2 or (values == values[0]).all():
        return [np.zeros_like(one) for one in returns]
    return [(one - values.mean()) / (values.std(ddof=1) + _STD_FLOOR) for one in returns]


def of_tokens(segment: Segment, advantages: Values) -> Float32Array:
    """The advantage of each token of a segment: that of the turn that sampled it, 0 for other tokens.

    Args:
        segment: with the turns that it holds; one without them holds a trajectory's last turn alone.
        advantages: [K] of the turns of its trajectory.

    Returns:
        [T]

    Raises:
        ValueError: its turns are not those of its sampled tokens.
    """
    found = np.zeros(len(segment.tokens), np.float32)
    sampled = np.flatnonzero(segment.mask)
    turns = segment.turns or [(len(advantages) - 1, len(sampled))]
    if sum(tokens for _, tokens in turns) != len(sampled) or any(turn >= len(advantages) for turn, _ in turns):
        raise ValueError(
            f"turns {turns} of a segment with {len(sampled)} sampled tokens, and {len(advantages)} rewards"
        )
    found[sampled] = np.repeat([advantages[turn] for turn, _ in turns], [tokens for _, tokens in turns])
    return found
