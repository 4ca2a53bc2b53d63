"""Groups with further members: the first that are complete are trained, and the others end as surplus."""

import pytest

from harness.buffer_feed import feed
from harness.folds import NO_PAYLOAD, decided
from topics.batches import BatchPacked
from topics.groups import GroupCompleted
from topics.trajectories import TrajectoryDropped, TrajectorySubmitted, VersionCount


def issued(size: int, wanted: int):
    fed = feed(batch_groups={"warmup": 1, "rl": 1})
    for member in range(size):
        fed.issued(f"p000000-{member}", size=size, wanted=wanted)
    return fed


def members_of(packed: BatchPacked) -> list[str]:
    return [member.trajectory_id for member in packed.groups[0].members]


def test_the_first_members_are_packed_and_the_open_ones_end():
    fed = issued(4, 2).graded("p000000-3", size=4, at_s=1)
    assert decided(fed) == []

    *drops, packed = decided(fed.graded("p000000-1", size=4, at_s=2))

    assert [(drop.trajectory_id, drop.reason, drop.tokens) for drop in drops] == [
        ("p000000-0", "surplus", 0),
        ("p000000-2", "surplus", 0),
    ]
    assert members_of(packed) == ["p000000-1", "p000000-3"]
    fed.graded("p000000-0", size=4)
    assert (decided(fed), fed.fold.state.late) == ([], 1)
    assert fed.fold.state.surplus == {}


def test_of_more_complete_members_the_later_ones_end_with_their_tokens():
    fed = issued(4, 2)
    for member, at_s in ((2, 4), (0, 2), (3, 1), (1, 3)):
        fed.graded(f"p000000-{member}", size=4, at_s=at_s)

    *drops, packed = decided(fed)

    assert [(drop.trajectory_id, drop.tokens) for drop in drops] == [("p000000-1", 3), ("p000000-2", 3)]
    assert members_of(packed) == ["p000000-0", "p000000-3"]


def test_failed_members_keep_their_reason_and_a_group_with_too_few_grades_waits_for_the_others():
    fed = issued(4, 3).failed("p000000-0", size=4).graded("p000000-1", size=4).graded("p000000-2", size=4)
    assert decided(fed) == []

    failed, packed = decided(fed.graded("p000000-3", size=4))

    assert isinstance(failed, TrajectoryDropped) and failed.reason != "surplus"
    assert members_of(packed) == [f"p000000-{member}" for member in (1, 2, 3)]


def test_ends_that_were_stored_in_part_are_decided_again():
    fed = issued(4, 2).graded("p000000-0", size=4).graded("p000000-1", size=4)
    first, second = fed.fold.decide(1.0)
    fed.read_back([first])  # and the writer is gone

    again, packed = decided(fed)

    assert again == second
    assert members_of(packed) == ["p000000-0", "p000000-1"]


@pytest.mark.parametrize("late", [False, True])
def test_a_reward_of_groups_grades_the_wanted_members_alone(late: bool):
    fed = issued(3, 2)
    for member in (2, 0, 1) if late else (2, 0):
        fed.publish(
            TrajectorySubmitted(
                trajectory_id=f"p000000-{member}",
                prompt_id="p000000",
                member=member,
                group_size=3,
                stage="rl",
                payload=NO_PAYLOAD,
                versions=[VersionCount(0, 3)],
            )
        )

    dropped, asked = decided(fed)

    assert (dropped.trajectory_id, dropped.reason) == ("p000000-1", "surplus")
    assert isinstance(asked, GroupCompleted)
    assert [member.member for member in asked.members] == [0, 2]
    fed.graded("p000000-0", size=3).graded("p000000-2", size=3)
    (packed,) = decided(fed)
    assert members_of(packed) == ["p000000-0", "p000000-2"]
