import math

import numpy as np
import pytest

from asyncrl.algorithms.advantages import group_advantages


def one_group(rewards, kind):
    (found,) = group_advantages([rewards], [kind])
    return found


def test_grpo_divides_by_the_unbiased_deviation():
    # mean 0.25, squares 3 * 0.0625 + 0.5625 = 0.75, / 3 = 0.25, deviation 0.5
    assert one_group([0.0, 0.0, 0.0, 1.0], kind="grpo") == pytest.approx([-0.5, -0.5, -0.5, 1.5], rel=1e-5)


def test_the_deviation_has_a_floor():
    reward = 1e-6 / math.sqrt(2) * 2  # deviation of {0, r} is r / sqrt 2, here 2e-6 / 2 = 1e-6
    assert one_group([0.0, reward], kind="grpo") == pytest.approx([-reward / 4e-6, reward / 4e-6])


def test_centered_only_subtracts_the_mean():
    assert one_group([1.0, 2.0, 6.0], kind="centered") == pytest.approx([-2.0, -1.0, 3.0])


def test_none_takes_rewards_as_they_are():
    assert one_group([1.0, -2.0], kind="none").tolist() == [1.0, -2.0]


@pytest.mark.parametrize("kind", ["grpo", "centered"])
@pytest.mark.parametrize("rewards", [[], [1.0], [0.1] * 3, [0.7] * 7])
def test_a_group_of_equal_rewards_has_no_advantage(kind, rewards):
    assert one_group(rewards, kind=kind).tolist() == [0.0] * len(rewards)


def test_grpo_advantages_do_not_change_when_rewards_are_scaled_and_shifted():
    rewards = np.random.default_rng(0).normal(size=8)
    assert one_group(rewards, kind="grpo") == pytest.approx(one_group(100.0 * rewards + 7.0, kind="grpo"), rel=1e-4)


def test_a_reward_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="finite"):
        one_group([0.0, math.nan], kind="grpo")
