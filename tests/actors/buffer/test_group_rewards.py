"""Groups that one call grades: asked for once, when no member is under way; with those there are at the deadline."""

import msgspec
import pytest

from actors.buffer.fold import BufferFold
from actors.buffer.state import BufferState
from asyncrl.config.held_out import HeldOut
from harness.buffer_feed import feed
from harness.folds import NO_PAYLOAD, decided
from topics.batches import BatchPacked
from topics.evals import EvalScored
from topics.groups import GroupCompleted, GroupDropped
from topics.trajectories import TrajectoryDropped, TrajectorySubmitted, VersionCount
from topics.wire import decode, encode


def submitted(fed, name, *, size=2, stage="rl"):
    prompt_id, member = name.rsplit("-", 1)
    message = TrajectorySubmitted(
        trajectory_id=name,
        prompt_id=prompt_id,
        member=int(member),
        group_size=size,
        stage=stage,
        payload=NO_PAYLOAD,
        versions=[VersionCount(0, 3)],
    )
    return fed.publish(message)


def issued(size, **changes):
    fed = feed(batch_groups={"warmup": 2, "rl": 1}, **changes)
    for member in range(size):
        fed.issued(f"p000000-{member}", size=size)
    return fed


def asked(decisions):
    return [
        (decision.group_id, [member.member for member in decision.members])
        for decision in decisions
        if isinstance(decision, GroupCompleted)
    ]


@pytest.mark.parametrize("order", ["submitted first", "failure first"])
def test_a_group_is_graded_once_when_its_last_member_is_generated_or_has_failed(order):
    fed = issued(3)
    submitted(fed, "p000000-2", size=3)
    assert decided(fed, 1) == []
    if order == "submitted first":
        submitted(fed, "p000000-0", size=3).failed("p000000-1", size=3)
    else:
        submitted(fed.failed("p000000-1", size=3), "p000000-0", size=3)

    assert asked(decided(fed, 1)) == [("p000000", [0, 2])]
    submitted(fed, "p000000-0", size=3)  # a reward worker that was killed before it acknowledged

    assert (decided(fed, 50), fed.fold.state.late) == ([], 1)
    fed.graded("p000000-0", 0.5, size=3).graded("p000000-2", 1.0, size=3)
    failed, packed = decided(fed, 51)
    assert isinstance(failed, TrajectoryDropped) and failed.trajectory_id == "p000000-1"
    assert isinstance(packed, BatchPacked)
    assert [member.reward for member in packed.groups[0].members] == [0.5, 1.0]
    assert fed.fold.next_deadline() is None
    assert fed.fold.state.grading == fed.fold.state.gathered == {}


def test_a_member_whose_reward_the_rollout_function_gave_waits_with_the_others():
    fed = issued(2).graded("p000000-0", 0.25)
    submitted(fed, "p000000-1")

    assert asked(decided(fed, 1)) == [("p000000", [1])]


def test_at_the_deadline_the_members_that_are_there_are_graded():
    fed = issued(3)
    submitted(submitted(fed, "p000000-0", size=3), "p000000-1", size=3)
    assert (decided(fed, 99), fed.fold.next_deadline()) == ([], 100)

    late, _ = found = decided(fed, 100)

    assert isinstance(late, TrajectoryDropped)
    assert (late.trajectory_id, late.reason) == ("p000000-2", "deadline")
    assert asked(found) == [("p000000", [0, 1])]
    assert fed.fold.next_deadline() == 200


def test_a_group_with_too_few_members_at_the_deadline_is_dropped_with_what_they_sampled():
    fed = issued(3)
    submitted(fed, "p000000-0", size=3)

    [dropped] = decided(fed, 100)

    assert isinstance(dropped, GroupDropped)
    assert (dropped.reason, dropped.members, dropped.tokens) == ("deadline", 3, 3)
    assert fed.fold.open == 0


def test_a_group_that_nobody_grades_has_a_deadline_of_its_own():
    fed = issued(2)
    submitted(submitted(fed, "p000000-0"), "p000000-1")
    assert asked(decided(fed, 60)) == [("p000000", [0, 1])]
    assert (decided(fed, 159), fed.fold.next_deadline()) == ([], 160)

    [dropped] = decided(fed, 160)

    assert isinstance(dropped, GroupDropped)
    assert (dropped.reason, dropped.tokens) == ("deadline", 6)
    assert fed.fold.next_deadline() is None


def test_the_answers_to_one_row_of_an_evaluation_are_a_group_of_their_own():
    fed = feed(held_out={"": HeldOut("", 2, 2, 0.0, 8, [], 1.0)})
    for member in range(4):
        fed.issued(f"e000003-{member}", size=4, stage="eval")
    for member in (3, 2):
        submitted(fed, f"e000003-{member}", size=4, stage="eval")

    assert asked(decided(fed, 1)) == [("e000003-2", [2, 3])]
    submitted(fed, "e000003-0", size=4, stage="eval")
    fed.graded("e000003-2", 1.0, size=4, stage="eval").graded("e000003-3", 0.0, size=4, stage="eval")
    found = decided(fed, 100)
    assert asked(found) == [("e000003-0", [0])]  # member 1 came too late
    fed.graded("e000003-0", 0.5, size=4, stage="eval")
    [scored] = decided(fed, 101)

    assert isinstance(scored, EvalScored)
    assert (scored.accuracy, scored.failed) == (0.375, 1)


def test_a_buffer_that_begins_anew_decides_the_same_wherever_the_logs_are_cut():
    """Its own log is read before, between or after the others, and a snapshot lies anywhere."""
    fed = issued(2)
    submitted(submitted(fed, "p000000-0"), "p000000-1")
    [completed] = fed.fold.decide(60)

    first = feed(batch_groups={"warmup": 2, "rl": 1})
    first.read_back([completed], at_s=60)
    first.fold.state = decode(BufferState, encode(first.fold.state))
    for member in range(2):
        submitted(first.issued(f"p000000-{member}"), f"p000000-{member}")

    assert (decided(first, 70), first.fold.next_deadline()) == ([], 160)
    fed.read_back([completed], at_s=60)
    assert msgspec.to_builtins(first.fold.state.groups) == msgspec.to_builtins(fed.fold.state.groups)
    assert isinstance(first.fold, BufferFold)
