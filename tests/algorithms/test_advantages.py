import math

import numpy as np
import pytest

from asyncrl.algorithms.advantages import group_advantages
from asyncrl.algorithms.gdpo import decoupled


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


def test_max_rl_divides_by_the_mean():
    assert one_group([0.0, 0.0, 0.0, 1.0], kind="max_rl") == pytest.approx([-1.0, -1.0, -1.0, 3.0])
    assert one_group([-1.0, 0.0], kind="max_rl").tolist() == [0.0, 0.0]


def test_opo_subtracts_the_mean_over_tokens():
    # (1 x 30 + 0 x 10) / 40 = 0.75
    found = group_advantages(
        [[1.0, 0.0], [2.0, 2.0], [1.0, 3.0]], ["opo", "opo", "centered"], [[30, 10], [1, 2], [5, 9]]
    )

    assert [values.tolist() for values in found] == [[0.25, -0.75], [0.0, 0.0], [-1.0, 1.0]]
    assert one_group([1.0, 0.0], kind="opo").tolist() == [0.5, -0.5]


def test_none_takes_rewards_as_they_are():
    assert one_group([1.0, -2.0], kind="none").tolist() == [1.0, -2.0]


@pytest.mark.parametrize("kind", ["grpo", "centered", "rloo", "max_rl", "opo"])
@pytest.mark.parametrize("rewards", [[], [1.0], [0.1] * 3, [0.7] * 7])
def test_a_group_of_equal_rewards_has_no_advantage(kind, rewards):
    assert one_group(rewards, kind=kind).tolist() == [0.0] * len(rewards)


def test_grpo_advantages_do_not_change_when_rewards_are_scaled_and_shifted():
    rewards = np.random.default_rng(0).normal(size=8)
    assert one_group(rewards, kind="grpo") == pytest.approx(one_group(100.0 * rewards + 7.0, kind="grpo"), rel=1e-4)


def test_a_reward_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="finite"):
        one_group([0.0, math.nan], kind="grpo")


UNEVEN = [[1.0, 0.0, 0.0], [0.5], [2.0, 2.0], [0.0, 1.0, 1.0, 4.0, -1.0]]


def scalar_rloo(rewards):
    """Each reward against the mean of the others."""
    if len(rewards) < 2:
        return [0.0]
    return [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]


def deviation(values):
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def scalar_reinforce_pp(groups):
    every = [r for group in groups for r in group]
    mean, scale = sum(every) / len(every), deviation(every) + 1e-6
    return [[(r - mean) / scale for r in group] for group in groups]


def scalar_baseline(groups):
    centered = [[r - sum(group) / len(group) for r in group] for group in groups]
    scale = deviation([value for group in centered for value in group]) + 1e-6
    return [[value / scale for value in group] for group in centered]


def scalar_less_others(groups):
    means = [sum(group) / len(group) for group in groups]
    others = [means[:at] + means[at + 1 :] for at in range(len(groups))]
    return [[r - sum(rest) / len(rest) for r in group] for group, rest in zip(groups, others, strict=True)]


@pytest.mark.parametrize(
    ("kind", "scalar"),
    [
        ("less_others", scalar_less_others),
        ("rloo", lambda groups: [scalar_rloo(group) for group in groups]),
        ("reinforce_pp", scalar_reinforce_pp),
        ("reinforce_pp_baseline", scalar_baseline),
    ],
)
def test_estimators_follow_their_formulas_on_uneven_groups(kind, scalar):
    found = group_advantages(UNEVEN, [kind] * len(UNEVEN))

    for values, expected in zip(found, scalar(UNEVEN), strict=True):
        assert values.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_the_only_group_of_a_batch_has_its_reward_less_nothing():
    [values] = group_advantages([[0.5]], ["less_others"])

    assert values.tolist() == [0.5]


def test_batch_statistics_are_of_the_groups_that_name_the_estimator():
    others = group_advantages([*UNEVEN, [100.0, -100.0]], ["reinforce_pp"] * len(UNEVEN) + ["centered"])
    alone = group_advantages(UNEVEN, ["reinforce_pp"] * len(UNEVEN))

    assert [values.tolist() for values in others[:-1]] == [values.tolist() for values in alone]
    assert others[-1].tolist() == [100.0, -100.0]


@pytest.mark.parametrize("kind", ["reinforce_pp", "reinforce_pp_baseline", "rloo"])
def test_a_batch_of_equal_rewards_has_no_advantage(kind):
    for rewards in ([[0.1] * 3, [0.1] * 7], [[0.7]]):
        found = group_advantages(rewards, [kind] * len(rewards))
        assert [values.tolist() for values in found] == [[0.0] * len(group) for group in rewards]


def test_gdpo_normalises_each_reward_over_its_group_and_then_the_sums_over_the_batch():
    # Two kinds: correct with weight 1, short with weight 0.5. The unbiased deviation of {0, 1} is 1 / sqrt 2.
    groups = [np.array([[1.0, 0.0], [0.0, 10.0]]), np.array([[1.0, 3.0], [1.0, 3.0], [1.0, 9.0]])]
    half, third = 0.5**0.5, [-1 / 3**0.5, -1 / 3**0.5, 2 / 3**0.5]
    added = [[half - 0.5 * half, 0.5 * half - half], [0.5 * value for value in third]]
    every = added[0] + added[1]  # their mean is 0

    found = decoupled(groups, [1.0, 0.5])

    assert np.concatenate(found) == pytest.approx([value / deviation(every) for value in every], rel=1e-4)


def test_gdpo_tells_apart_members_whose_summed_rewards_are_equal():
    (found,) = decoupled([np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])], [2.0, 1.0])

    assert found[0] > found[1] > found[2]
    assert decoupled([np.ones((3, 2))], [1.0, 1.0])[0].tolist() == [0.0, 0.0, 0.0]
