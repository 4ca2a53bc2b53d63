import numpy as np
import pytest

from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.batches import GradedGroup, GradedTrajectory, build_rows
from asyncrl.algorithms.named import AlgorithmError
from topics.batches import Objective
from topics.trajectories import Segment


def segment(prompt, versions):
    """A prompt of the given length, then one token for each version."""
    size, versions = prompt + len(versions), np.array([-1] * prompt + list(versions), np.int32)
    mask = np.array([0] * prompt + [1] * (size - prompt), np.uint8)
    return Segment(np.arange(size, dtype=np.int32), mask, np.where(mask, -0.5, 0.0).astype(np.float32), versions)


GROUPS = [
    [
        GradedTrajectory("p0-0", [segment(2, [3, 3]), segment(3, [3, 4])], 1.0),
        GradedTrajectory("p0-1", [segment(2, [1, 4, 5])], 0.0),
    ],
    [
        GradedTrajectory("p1-0", [segment(1, [5])], 0.5),
        GradedTrajectory("p1-1", [segment(1, [5, 5])], 0.5),
    ],
]


def rows_of(groups, *, step=6, min_version=0, advantage="grpo", aggregation="trajectory"):
    given = [GradedGroup(group, advantage, 0.7) for group in groups]
    return build_rows(given, Objective(aggregation=aggregation), step=step, min_version=min_version)


def test_every_segment_becomes_a_row_with_its_trajectorys_advantage_and_weight():
    rows, _ = rows_of(GROUPS, step=6, advantage="centered")

    assert [row.trajectory_id for row in rows] == ["p0-0", "p0-0", "p0-1", "p1-0", "p1-1"]
    assert [set(row.advantages.tolist()) for row in rows] == [{0.5}, {0.5}, {-0.5}, {0.0}, {0.0}]
    assert [len(row.advantages) for row in rows] == [4, 5, 5, 2, 3]
    assert [row.weights[0] for row in rows] == [np.float32(1 / tokens) for tokens in (16, 16, 12, 4, 8)]
    assert {(row.temperature, row.estimator) for row in rows} == {(0.7, "centered")}
    assert rows[1].tokens is GROUPS[0][0].segments[1].tokens


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_group_statistics_count_trajectories_and_not_their_segments(advantage):
    whole = segment(2, [3, 3, 3, 4])
    parts = [segment(2, [3]), segment(3, [3]), segment(2, [3, 4])]
    found = []
    for first in ([whole], parts):
        members = [GradedTrajectory("p0-2", first, 2.0), *GROUPS[0]]
        rows, _ = rows_of([members, GROUPS[1]], advantage=advantage)
        found.append({row.trajectory_id: (row.advantages[1], row.weights[1]) for row in rows})
        assert len({(row.trajectory_id, row.advantages[1], row.weights[1]) for row in rows}) == 5

    assert found[0] == found[1]


def test_each_group_of_a_batch_has_its_own_estimator_and_temperature():
    three = [GradedTrajectory(f"p2-{member}", [segment(1, [5])], float(member == 2)) for member in range(3)]
    groups = [GradedGroup(GROUPS[0], "grpo", 0.5), GradedGroup(three, "centered", 2.0), GradedGroup(three[2:], "none")]

    rows, _ = build_rows(groups, Objective(), step=6, min_version=0)

    # grpo: rewards 1 and 0 have the mean 1/2 and the unbiased deviation 1 / sqrt(2)
    by_hand = [0.5**0.5, 0.5**0.5, -(0.5**0.5), -1 / 3, -1 / 3, 2 / 3, 1.0]
    assert [row.advantages[0] for row in rows] == pytest.approx(by_hand, rel=2e-6)
    assert [row.temperature for row in rows] == [0.5] * 3 + [2.0] * 3 + [1.0]
    assert {row.weights[0] for row in rows} == {np.float32(1 / 11)}  # by tokens of the whole batch


def test_stale_tokens_are_masked_and_take_their_weight_with_them():
    fresh, _ = rows_of(GROUPS)
    rows, stats = rows_of(GROUPS, step=6, min_version=4)

    assert [row.mask.tolist() for row in rows] == [
        [0, 0, 0, 0],
        [0, 0, 0, 0, 1],
        [0, 0, 0, 1, 1],
        [0, 1],
        [0, 1, 1],
    ]
    for row, other in zip(rows, fresh, strict=True):
        assert np.array_equal(row.weights, other.weights)
        assert np.array_equal(row.advantages, other.advantages)
    assert (stats.tokens_trained, stats.tokens_stale) == (6, 4)
    assert stats.lag_histogram == {0: 4, 1: 2}


def test_supervised_tokens_never_grow_stale_and_have_no_lag():
    given = [[GradedTrajectory("s0", [segment(1, [-1, -1])])]]
    rows, stats = rows_of(given, step=100, min_version=90, advantage="none")

    assert rows[0].mask.tolist() == [0, 1, 1]
    assert (stats.tokens_trained, stats.lag_histogram) == (2, {})


def test_the_first_token_of_a_segment_is_never_trained_on():
    whole = Segment(
        np.arange(3, dtype=np.int32), np.ones(3, np.uint8), np.zeros(3, np.float32), np.full(3, -1, np.int32)
    )
    rows, stats = rows_of([[GradedTrajectory("s0", [whole])]], step=1, aggregation="token")

    assert rows[0].mask.tolist() == [0, 1, 1]
    assert rows[0].weights.tolist() == [0.5] * 3
    assert whole.mask.tolist() == [1, 1, 1]
    assert (stats.tokens_trained, stats.tokens_stale) == (2, 0)


def test_reward_statistics_are_over_trajectories():
    _, stats = rows_of(GROUPS)
    assert (stats.trajectories, stats.reward_mean) == (4, 0.5)
    assert stats.reward_std == pytest.approx(np.std([1.0, 0.0, 0.5, 0.5]))


def test_empty_batches_and_segments_are_no_trouble():
    assert rows_of([], step=1)[0] == []
    empty = GradedTrajectory("p0-0", [segment(0, []), segment(1, [0]), segment(0, [])], 1.0)
    rows, stats = rows_of([[empty]], step=1)
    assert [row.mask.tolist() for row in rows] == [[], [0, 1], []]
    assert stats.tokens_trained == 1


def test_gdpo_takes_the_metrics_that_the_objective_weighs():
    metrics = [{"correct": 1.0, "short": 0.0}, {"correct": 0.0, "short": 10.0}]
    members = [one._replace(metrics=given) for one, given in zip(GROUPS[0], metrics, strict=True)]
    objective = Objective(reward_weights={"correct": 1.0, "short": 0.5})

    rows, _ = build_rows([GradedGroup(members, "gdpo")], objective, step=6, min_version=0)

    # Sums 0.5 / sqrt 2 and its negative, whose unbiased deviation is 0.5.
    assert [row.advantages[0] for row in rows] == pytest.approx([0.5**0.5] * 2 + [-(0.5**0.5)], rel=1e-4)
    with pytest.raises(AlgorithmError, match='p0-1 has no metric "correct"'):
        build_rows([GradedGroup([members[0], GROUPS[0][1]], "gdpo")], objective, step=6, min_version=0)


@pytest.mark.parametrize("advantage", [name for name, one in ADVANTAGES.items() if one.compares and name != "gdpo"])
def test_late_members_compare_with_those_of_their_prompt_that_earlier_batches_had(advantage: str):
    whole = [
        GradedTrajectory(f"p0-{at}", [segment(2, [3, 3])], reward) for at, reward in enumerate((1.0, 0.0, 0.5, 0.0))
    ]
    before = [member._replace(segments=(), elsewhere=2) for member in whole[:3]]

    together, _ = build_rows([GradedGroup(whole, advantage)], Objective(), step=6, min_version=0)
    late, stats = build_rows([GradedGroup(whole[3:], advantage, before=before)], Objective(), step=6, min_version=0)

    assert [row.trajectory_id for row in late] == ["p0-3"]
    assert late[0].advantages.tolist() == together[3].advantages.tolist() != [0.0] * 4
    assert (stats.trajectories, stats.tokens_trained) == (1, 2)
    assert late[0].weights[0] == np.float32(0.5)


def test_estimators_that_compare_no_members_see_the_late_ones_alone():
    late = GradedTrajectory("p0-3", [segment(2, [3])], 0.25)
    group = GradedGroup([late], "none", before=[GradedTrajectory("p0-0", (), 1.0, 2)])

    rows, _ = build_rows([group], Objective(), step=6, min_version=0)

    assert set(rows[0].advantages.tolist()) == {0.25}
