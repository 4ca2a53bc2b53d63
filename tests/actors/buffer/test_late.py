"""Late members: they continue after a batch took the first of their group, and a later batch takes them once."""

import pytest

from harness.buffer_feed import feed
from harness.configs import the_problem
from harness.folds import decided
from topics.batches import BatchPacked, Objective
from topics.groups import GroupDropped
from topics.trajectories import TrajectoryDropped


def issued(fed=None, *, number=0, size=4, wanted=2, **plan):
    fed = fed or feed(batch_groups={"warmup": 1, "rl": 1}, keep=True, **plan)
    for member in range(size):
        fed.issued(f"p{number:06d}-{member}", size=size, wanted=wanted)
    return fed


def taken(packed: BatchPacked) -> dict[str, list[str]]:
    return {group.prompt_id: [member.trajectory_id for member in group.members] for group in packed.groups}


def next_group(fed, number: int):
    """Another group of which two members are graded, so that a batch can be packed."""
    issued(fed, number=number, size=2)
    for member, reward in enumerate((0.0, 1.0)):
        fed.graded(f"p{number:06d}-{member}", reward, versions=((number, 3),))
    return fed


def test_a_late_member_continues_and_the_next_batch_takes_it_with_those_before_it():
    fed = issued().graded("p000000-3", size=4).graded("p000000-1", 0.5, size=4)
    (packed,) = decided(fed)
    assert taken(packed) == {"p000000": ["p000000-1", "p000000-3"]}
    assert packed.groups[0].further == [0, 2]
    fed.trained(1).graded("p000000-2", 0.0, size=4)
    assert decided(fed) == []  # it waits for a batch

    (packed,) = decided(next_group(fed, 1))

    assert taken(packed) == {"p000001": ["p000001-0", "p000001-1"], "p000000": ["p000000-2"]}
    late = packed.groups[1]
    assert ([one.trajectory_id for one in late.before], late.further) == (["p000000-1", "p000000-3"], [0])
    assert (late.scores, packed.new_groups) == ([0.5, 1.0, 0.0], packed.groups[:1])
    fed.trained(2).graded("p000000-0", versions=((1, 3),), size=4)
    (packed,) = decided(next_group(fed, 2))
    assert taken(packed)["p000000"] == ["p000000-0"]
    assert "p000000" in fed.fold.state.closed
    assert fed.fold.state.continued == {}


def test_all_members_that_are_graded_in_time_are_in_the_first_batch():
    fed = issued()
    for member in range(4):
        fed.graded(f"p000000-{member}", size=4)

    (packed,) = decided(fed)

    assert (taken(packed), packed.groups[0].further) == ({"p000000": [f"p000000-{at}" for at in range(4)]}, [])
    assert "p000000" in fed.fold.state.closed


def test_late_members_end_alone_when_they_fail_or_are_too_old_or_open_at_the_deadline():
    fed = issued(size=5).graded("p000000-0", size=5).graded("p000000-1", 0.0, size=5)
    decided(fed)
    fed.failed("p000000-2", size=5)
    (failed,) = decided(fed)
    assert (failed.trajectory_id, failed.reason) == ("p000000-2", "rollout")

    decided(next_group(fed.trained(1), 1))
    decided(next_group(fed.trained(2), 2))
    fed.trained(3).graded("p000000-3", size=5)  # by version 0, for a batch that takes version 2 or newer
    old, packed = decided(next_group(fed, 3))
    assert (old.trajectory_id, old.reason, old.lag) == ("p000000-3", "lag", 3)
    assert taken(packed).keys() == {"p000003"}
    assert "p000000" not in fed.fold.state.closed

    (ended,) = decided(fed, now_s=101.0)
    assert (ended.trajectory_id, ended.reason) == ("p000000-4", "deadline")
    assert "p000000" in fed.fold.state.closed


def test_after_the_last_batch_late_members_end_as_surplus():
    fed = issued(steps=1).graded("p000000-0", size=4).graded("p000000-1", size=4).graded("p000000-2", size=4)

    packed, ended = decided(fed)

    assert packed.groups[0].further == [3]
    assert isinstance(ended, TrajectoryDropped)
    assert (ended.trajectory_id, ended.reason) == ("p000000-3", "surplus")
    assert fed.fold.open == 0


def test_a_group_that_a_filter_would_drop_waits_for_its_open_members():
    def objective(step: int, stage: str) -> Objective:
        return Objective(filters=["zero_variance"])

    fed = issued(objective=objective).graded("p000000-0", size=4).graded("p000000-1", size=4)
    assert decided(fed) == []

    (packed,) = decided(fed.graded("p000000-2", 0.0, size=4))
    assert len(packed.groups[0].members) == 3

    fed = issued(objective=objective)
    for member in range(4):
        fed.graded(f"p000000-{member}", size=4)
    (dropped,) = decided(fed)
    assert isinstance(dropped, GroupDropped)


def test_messages_of_late_members_count_in_any_order_of_the_logs():
    """A restarted buffer may read its own log first."""
    fed = issued().graded("p000000-3", size=4).graded("p000000-1", 0.5, size=4)
    (packed,) = decided(fed)
    again = feed(batch_groups={"warmup": 1, "rl": 1}, keep=True).publish(packed)
    issued(again).graded("p000000-3", size=4).graded("p000000-1", 0.5, size=4).graded("p000000-2", 0.0, size=4)
    again.trained(1)

    assert decided(again) == []
    (packed,) = decided(next_group(again, 1))
    assert taken(packed)["p000000"] == ["p000000-2"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["rollout.oversample=0"], "has no effect without further members"),
        (["reward.scope=group", "reward.function=a.py:b"], "late members have a grade of their own"),
        (["learner.aggregation=group"], "a late member alone would count as a whole group"),
    ],
)
def test_late_members_need_further_ones_that_are_graded_and_count_alone(settings: list[str], words: str):
    problem = the_problem("demo", "rollout.late=keep", "rollout.oversample=2", *settings)

    assert problem.message.startswith(words)
