"""Advantages of turns, against numbers worked by hand and a loop written from the formula."""

import math

import numpy as np
import pytest

from asyncrl.algorithms.batches import GradedGroup, GradedTrajectory, build_rows
from asyncrl.algorithms.turn_returns import of_tokens, turn_advantages
from topics.batches import Objective
from topics.trajectories import Segment


def test_returns_are_discounted_within_a_trajectory_and_normalised_over_the_turns_of_the_group():
    # Returns at 0.5: [1 + 0, 0] and [0 + 0.5 + 0.5, 1 + 1, 2]: 1, 0, 1, 2, 2; mean 1.2,
    # squares 0.04 + 1.44 + 0.04 + 0.64 + 0.64 = 2.8, / 4 = 0.7, deviation 0.836660
    first, second = turn_advantages([[1.0, 0.0], [0.0, 1.0, 2.0]], 0.5)

    assert first == pytest.approx([-0.2 / 0.836660, -1.2 / 0.836660], rel=1e-5)
    assert second == pytest.approx([-0.2 / 0.836660, 0.8 / 0.836660, 0.8 / 0.836660], rel=1e-5)


def scalar(members, discount):
    returns = []
    for rewards in members:
        own = []
        for k in range(len(rewards)):
            own.append(sum(discount ** (j - k) * rewards[j] for j in range(k, len(rewards))))
        returns.append(own)
    flat = [value for own in returns for value in own]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((value - mean) ** 2 for value in flat) / (len(flat) - 1))
    return [[(value - mean) / (std + 1e-6) for value in own] for own in returns]


@pytest.mark.parametrize("discount", [0.0, 0.9, 1.0])
def test_uneven_numbers_of_turns(discount):
    rng = np.random.default_rng(3)
    members = [rng.normal(size=size).tolist() for size in (1, 5, 2, 33)]

    found = turn_advantages(members, discount)

    for own, expected in zip(found, scalar(members, discount), strict=True):
        assert own == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("members", [[], [[0.7]], [[0.5], [0.5]], [[0.0, 0.5], [0.5]]])
def test_equal_returns_have_no_advantage(members):
    assert [one.tolist() for one in turn_advantages(members, 1.0)] == [[0.0] * len(one) for one in members]


def test_a_reward_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="finite"):
        turn_advantages([[0.0, math.nan]], 1.0)


def segment(mask, turns):
    size = len(mask)
    mask = np.array(mask, np.uint8)
    zeros = np.zeros(size, np.float32)
    return Segment(np.arange(size, dtype=np.int32), mask, zeros, np.where(mask, 0, -1).astype(np.int32), turns)


# Turn 1 of the second member rewrote the history: it has a segment of its own.
FIRST = GradedTrajectory("p0-0", [segment([0, 1, 1, 0, 1], [(0, 2), (1, 1)])], 1.0, turn_rewards=[1.0, 0.0])
SECOND = GradedTrajectory(
    "p0-1",
    [segment([0, 1, 1, 1], [(0, 1), (2, 2)]), segment([0, 0, 1], [(1, 1)])],
    3.0,
    turn_rewards=[0.0, 1.0, 2.0],
)
LATER = Objective(turn_discount=0.5)


def rows_of(*members):
    return build_rows([GradedGroup(members, "turns")], LATER, step=1, min_version=0)[0]


def test_each_token_has_the_advantage_of_its_turn_in_whichever_segment():
    (a, b), (c, d, e) = turn_advantages([FIRST.turn_rewards, SECOND.turn_rewards], 0.5)

    found = [row.advantages for row in rows_of(FIRST, SECOND)]

    expected = [[0, a, a, 0, b], [0, c, e, e], [0, 0, d]]
    assert [row.tolist() for row in found] == [np.array(row, np.float32).tolist() for row in expected]


def test_a_rank_that_has_one_member_alone_gives_its_tokens_the_same():
    whole = rows_of(FIRST, SECOND)
    elsewhere = GradedTrajectory("p0-0", (), 1.0, 3, turn_rewards=FIRST.turn_rewards)

    part = rows_of(elsewhere, SECOND)

    for row, same in zip(part, whole[1:], strict=True):
        assert (row.advantages == same.advantages).all() and (row.weights == same.weights).all()


def test_without_rewards_of_turns_the_reward_is_that_of_the_last_turn():
    plain = [GradedTrajectory(f"p0-{n}", [segment([0, 1, 1], [])], float(n)) for n in range(2)]

    low, high = (row.advantages.tolist() for row in rows_of(*plain))

    assert low == pytest.approx([0.0, -1 / math.sqrt(2), -1 / math.sqrt(2)], rel=1e-5)
    assert high == [0.0, -low[1], -low[2]]


def test_turns_that_do_not_fit_the_tokens_are_refused():
    with pytest.raises(ValueError, match="2 sampled tokens, and 1 rewards"):
        of_tokens(segment([0, 1, 1], [(0, 1)]), np.zeros(1))
    with pytest.raises(ValueError, match="2 sampled tokens, and 1 rewards"):
        of_tokens(segment([0, 1, 1], [(1, 2)]), np.zeros(1))
