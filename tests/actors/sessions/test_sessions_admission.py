"""Graded turns: which are trained, alone or with their siblings, and which end."""

import pytest

from actors.sessions.admission import Room
from harness.session_feed import (
    IDLE_S,
    SIBLINGS_S,
    Sessions,
    admitted,
    feedback,
    grade,
    packed,
    skipped,
    trained,
)
from topics.batches import BatchGroup, BatchMember, BatchPacked
from topics.groups import GroupDropped
from topics.trajectories import Reference
from topics.turns import FeedbackGiven, Sibling, TurnAdmitted, TurnJudged, TurnOverruled, TurnSkipped


def test_the_newest_are_admitted_first_as_far_as_there_is_room_and_the_oldest_of_too_many_end():
    sessions = Sessions(room=Room(under_way=2, waiting=2, max_lag=4))
    for turn in "abcdef":
        sessions.served(turn).publish(grade(turn))

    assert sessions.decide() == [
        admitted("f", 1.0),
        admitted("e", 1.0),
        skipped("a", "surplus", 1.0),
        skipped("b", "surplus", 1.0),
    ]
    assert sessions.publish(packed(1, "l000000", "p000003")).decide() == [admitted("d", 1.0)]
    dropped = GroupDropped(prompt_id="l000001", reason="lag")
    assert sessions.served("g").publish(grade("g")).decide() == []
    assert sessions.publish(dropped).decide() == [admitted("g", 1.0)]
    assert sessions.fold.state.graded == {"c": None}


def test_a_turn_that_the_next_batch_would_refuse_ends_before_its_place_comes():
    sessions = Sessions(room=Room(under_way=1, waiting=9, max_lag=4))
    for turn in "abc":  # their newest token is of version 2
        sessions.served(turn).publish(grade(turn))
    assert sessions.decide() == [admitted("c", 1.0)]

    assert sessions.publish(packed(6, "l000000")).publish(trained(6)).decide() == [admitted("b", 1.0)]
    assert sessions.publish(trained(7)).decide() == [skipped("a", "behind", 1.0)]


def test_feedback_overrules_a_judge_while_the_turn_waits():
    sessions = Sessions(room=Room(under_way=1, waiting=9, max_lag=4))
    sessions.served("a").publish(grade("a")).served("b").publish(grade("b"))
    assert sessions.decide() == [admitted("b", 1.0)]

    assert sessions.publish(feedback("a", -1.0)).decide() == []
    assert sessions.publish(packed(1, "l000000")).decide() == [admitted("a", -1.0, "user")]


def test_an_end_that_is_read_before_its_admission_leaves_room():
    sessions = Sessions(room=Room(under_way=1, waiting=9, max_lag=4)).publish(packed(1, "l000000"))

    sessions.served("a").publish(grade("a")).served("b").publish(grade("b"))

    assert sessions.decide() == [admitted("b", 1.0), admitted("a", 1.0)]


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_end_of_a_turn_has_the_grade_of_its_shadow_answer_unless_its_user_spoke(share):
    sessions = Sessions(share=share).served("a").served("b")
    for turn in "ab":
        sessions.publish(TurnJudged(turn_id=turn, reward=0.5, judge="words", shadow=-1.0, trial=7))
    sessions.publish(FeedbackGiven(feedback_id="f", turn_id="b", tenant="anna", score=1.0))

    ends = {end.turn_id: end for end in sessions.decide() if isinstance(end, TurnAdmitted | TurnSkipped)}

    assert [(ends[turn].reward, ends[turn].shadow, ends[turn].trial) for turn in "ab"] == [
        (0.5, -1.0, 7),
        (1.0, None, 0),
    ]


def together(first, *others, by="judge"):
    group = admitted(*first)
    group.siblings = [Sibling(turn, "s", reward, by, version=2) for turn, reward in others]
    return group


def test_siblings_are_admitted_as_one_group_once_all_that_may_be_graded_are():
    sessions = Sessions(room=Room(under_way=1, waiting=9, max_lag=4))
    for turn in "abc":
        sessions.started(turn, siblings="x")
    sessions.served("e", siblings="x", skip="greedy")
    for turn in "ab":
        sessions.finished(turn)
    sessions.publish(grade("a", -0.5)).publish(grade("b"))
    assert sessions.decide() == [skipped("e", "greedy")]
    assert sessions.fold.next_deadline() == SIBLINGS_S

    assert sessions.finished("c", "gone").decide() == [skipped("c", "gone"), together(("a", -0.5), ("b", 1.0))]
    assert sessions.fold.state.families == {} and sessions.fold.state.holding == {}
    assert sessions.publish(feedback("b", -1.0)).decide() == [TurnOverruled("b", "l000000", -1.0, member=1)]
    late = sessions.served("d", siblings="x").publish(grade("d"))
    assert late.decide() == []  # one group is under way
    members = [BatchMember(f"l000000-{one}", 0, Reference(1, "0" * 16, 1), reward, 2) for one, reward in ((1, 1.0),)]
    late.publish(BatchPacked(1, "rl", [BatchGroup("l000000", members)], 0))
    assert late.decide() == [admitted("d", 1.0)], "a sibling that comes later is a group of its own"
    assert late.fold.state.on_way.late == 1


def test_a_graded_turn_waits_for_its_siblings_for_a_time_and_not_for_those_of_others():
    sessions = Sessions().served("a", siblings="x").served("b", siblings="x").served("c", siblings="y")
    sessions.publish(grade("a"), at_s=1.0).publish(grade("c"), at_s=2.0)

    assert sessions.decide(at_s=2.0) == [admitted("c", 1.0)]
    assert sessions.fold.next_deadline() == 1.0 + SIBLINGS_S
    assert sessions.decide(at_s=0.9 + SIBLINGS_S) == []
    assert sessions.decide(at_s=1.0 + SIBLINGS_S) == [admitted("a", 1.0)]
    assert sessions.fold.next_deadline() == IDLE_S


def test_sampling_that_is_allowed_is_trained_and_a_greedy_reply_at_temperature_1():
    sessions = Sessions(allow=["greedy"])
    sessions.served("a", skip="greedy", temperature=0.0).served("b", skip="truncated").publish(grade("a"))

    assert sessions.decide() == [skipped("b", "truncated"), admitted("a", 1.0)]
