"""The keeper of sessions: which turn is ready, with which evidence, and which session ends."""

import pytest

from actors.sessions.admission import Room
from harness.session_feed import (
    IDLE_S,
    JUDGE_S,
    Sessions,
    admitted,
    ended,
    feedback,
    finished,
    grade,
    judged,
    packed,
    purge,
    ready,
    skipped,
    trained,
)
from topics.turns import (
    FeedbackGiven,
    SessionClosed,
    SessionLeft,
    TurnJudged,
    TurnOverruled,
    TurnSkipped,
)


def test_a_turn_is_ready_once_another_continues_it():
    sessions = Sessions().served("a")

    assert sessions.decide() == []
    assert sessions.started("b", "a").decide() == [ready("a", "b")]
    assert sessions.finished("b").decide() == []


def test_the_last_turn_is_ready_when_its_client_ends_the_session_or_falls_silent():
    left = Sessions().served("a").publish(SessionLeft(session_id="s", tenant="anna"))
    idle = Sessions().served("a", at_s=5.0)

    assert left.decide() == [ready("a"), SessionClosed(session_id="s", reason="left", until=3)]
    assert idle.fold.next_deadline() == 5.0 + IDLE_S
    assert idle.decide(at_s=4.9 + IDLE_S) == []
    assert idle.decide(at_s=5.0 + IDLE_S) == [ready("a"), SessionClosed(session_id="s", reason="idle", until=2)]
    assert (left.fold.state.sessions, idle.fold.state.sessions) == ({}, {})


def test_a_session_waits_for_a_reply_under_way_and_a_start_without_an_end_is_given_up():
    sessions = Sessions().started("a").publish(SessionLeft(session_id="s", tenant="anna"))

    assert sessions.decide() == []
    assert sessions.finished("a").decide()[0] == ready("a")
    lost = Sessions().started("a")
    assert lost.decide(at_s=IDLE_S)[0] == skipped("a", "lost")
    assert lost.finished("a").decide() == [], "its end came behind its own"


@pytest.mark.parametrize("reason", ["side", "greedy", "truncated"])
def test_a_turn_that_cannot_be_trained_ends_with_its_reason(reason: str):
    assert Sessions().served("a", skip=reason).decide() == [skipped("a", reason)]


def test_a_reply_that_is_none_ends_with_its_reason():
    sessions = Sessions().started("a").started("b").started("c")

    sessions.finished("a", "gone").finished("b", "failed").finished("c", tokens=0)

    assert sessions.decide() == [skipped("a", "gone"), skipped("b", "failed"), skipped("c", "empty")]
    assert sessions.fold.state.skipped == {"gone": 1, "failed": 1, "empty": 1}


def test_a_side_turn_is_no_evidence():
    assert Sessions().served("a").started("b", "a", skip="side").decide() == []


def test_a_retry_that_goes_on_with_a_cut_reply_says_nothing_new():
    sessions = Sessions().started("a").started("b", "a").started("c", "a", continues="b").started("d", "a")

    assert sessions.finished("a").decide() == [ready("a", "b", "d")]


def test_a_grade_admits_a_turn_once_however_often_it_comes():
    sessions = Sessions().served("a").started("b", "a")
    sessions.decide()

    sessions.publish(TurnJudged(turn_id="a", reward=0.5, judge="j")).publish(
        TurnJudged(turn_id="a", reward=-1.0, judge="j")
    )

    assert sessions.decide() == [admitted("a", 0.5)]
    assert sessions.publish(TurnJudged(turn_id="a", reward=1.0, judge="j")).decide() == []


def test_a_graded_turn_of_a_run_that_only_serves_ends():
    sessions = Sessions(share=0.0).served("a").publish(TurnJudged(turn_id="a", reward=0.5, judge="j"))

    assert sessions.decide() == [skipped("a", "off", 0.5)]


def test_without_a_valid_vote_or_in_time_there_is_no_grade():
    sessions = Sessions().served("a").served("b", "a").started("c", "b")
    sessions.decide()

    assert sessions.publish(TurnJudged(turn_id="a", reward=None, judge="j")).decide() == [skipped("a", "ungraded")]
    assert sessions.decide(at_s=JUDGE_S) == [skipped("b", "unjudged")]


def test_feedback_overrules_a_judge_until_the_turn_is_in_a_batch_and_is_counted_later():
    def feedback(turn, score, tenant="anna"):
        return FeedbackGiven(feedback_id=f"f{score}", turn_id=turn, tenant=tenant, score=score)

    def overruled(reward):
        return TurnOverruled(turn_id="a", prompt_id="l000000", reward=reward)

    sessions = (
        Sessions().served("a").publish(TurnJudged(turn_id="a", reward=0.5, judge="j")).publish(feedback("a", -1.0))
    )
    state = sessions.fold.state

    assert sessions.publish(feedback("a", 0.25, tenant="eve")).decide() == [admitted("a", -1.0, "user")]
    assert sessions.publish(feedback("a", -1.0)).publish(feedback("a", 0.5, tenant="eve")).decide() == []
    assert (state.late_feedback, state.on_way.late) == (2, 0)
    assert sessions.publish(feedback("a", 4.0)).decide() == [overruled(1.0)]  # within its bound
    assert sessions.publish(feedback("a", -0.5)).publish(feedback("a", 1.0)).decide() == []
    assert sessions.publish(feedback("a", -0.5)).decide() == [overruled(-0.5)]

    sessions.publish(packed(1, "l000000", reward=1.0))  # the buffer had not read the last one
    assert sessions.decide() == []
    assert (state.late_feedback, state.on_way.late) == (2, 1)
    assert sessions.publish(feedback("a", 1.0)).decide() == []
    assert state.late_feedback == 3
    assert not state.on_way.groups and not state.on_way.places


def test_a_graded_turn_is_never_unjudged_and_its_session_closes():
    sessions = Sessions(room=Room(under_way=0, waiting=9, max_lag=4))
    sessions.served("a").started("b", "a").decide()
    sessions.publish(grade("a")).finished("b").publish(feedback("b", 1.0)).publish(
        SessionLeft(session_id="s", tenant="anna")
    )

    assert sessions.decide() == [SessionClosed(session_id="s", reason="left", until=8)]
    assert sessions.decide(at_s=JUDGE_S + IDLE_S) == []
    assert list(sessions.fold.state.graded) == ["a", "b"]


def test_retries_and_branches_are_turns_of_their_own():
    sessions = Sessions().served("a").served("b", "a").served("c", "a").started("d", "c")

    assert sessions.decide() == [ready("a", "b", "c"), ready("c", "d")]
    sessions.finished("d").publish(SessionLeft(session_id="s", tenant="anna"))
    assert {turn.turn_id for turn in sessions.decide()[:2]} == {"b", "d"}


def test_logs_in_any_order_come_to_the_same():
    sessions = Sessions().served("a").served("b", "a").started("x", session="s2")
    sessions.publish(TurnJudged(turn_id="a", reward=1.0, judge="j"))
    sessions.decide()
    sessions.decide(at_s=IDLE_S)
    sessions.publish(TurnJudged(turn_id="b", reward=1.0, judge="j"), at_s=IDLE_S).decide(at_s=IDLE_S)

    late = Sessions()
    late.sequence = 1000
    late.read_back(sessions.log, at_s=IDLE_S)
    late.sequence = 0
    late.served("a").served("b", "a").started("x", session="s2")
    late.publish(TurnJudged(turn_id="a", reward=1.0, judge="j"))
    late.publish(TurnJudged(turn_id="b", reward=1.0, judge="j"), at_s=IDLE_S)

    assert late.decide(at_s=2 * IDLE_S) == []
    state = late.fold.state
    assert (state.turns, state.sessions, state.waiting) == ({}, {}, {})
    assert (state.ended_early, state.ready_early, state.closed_early) == (set(), {}, {})


def test_a_turn_of_weights_that_cannot_be_trained_any_more_is_not_admitted():
    sessions = Sessions()
    for turn, versions in (("old", (1, 1, 3)), ("mixed", (3, 3, 4))):
        sessions.started(turn).publish(finished(turn, versions))
    sessions.publish(trained(8))
    for turn in ("old", "mixed"):
        sessions.publish(judged(turn, 1.0))

    assert sessions.decide() == [skipped("old", "behind", 1.0, 3), admitted("mixed", 1.0, version=4)]


def test_garbage_is_quarantined_before_anybody_judges_it_and_a_reward_is_cut_to_its_bound():
    sessions = Sessions(reward=0.5)
    sessions.started("bad").publish(finished("bad", marks=["garbage"]))
    sessions.started("good").publish(finished("good")).publish(judged("good", -3.0))

    assert sessions.decide() == [skipped("bad", "garbage"), admitted("good", -0.5, version=1)]
    assert sessions.fold.state.watched.figures() == {"rewards_clipped": 1.0}


def test_the_same_prompt_and_reply_are_trained_so_often_and_no_more():
    sessions, ends = Sessions(repeats=2), []
    for number in range(4):
        turn = f"t{number}"
        sessions.started(turn).publish(finished(turn, same="ab")).publish(judged(turn, 1.0))
        ends += sessions.decide()
    sessions.started("other").publish(finished("other", same="cd")).publish(judged("other", 1.0))
    ends += sessions.decide()

    assert ends == [
        *(admitted("t0", 1.0, version=1), admitted("t1", 1.0, version=1)),
        *(skipped("t2", "repeat", 1.0, 1), skipped("t3", "repeat", 1.0, 1)),
        admitted("other", 1.0, version=1),
    ]


def test_alarms_are_raised_by_the_newest_turns():
    sessions = Sessions()
    for number in range(20):
        turn, marks = f"t{number}", ["question"] if number % 2 else []
        sessions.started(turn).publish(finished(turn, marks=marks)).publish(judged(turn, 1.0))
        sessions.publish(FeedbackGiven(f"f{number}", turn, "anna", -1.0 if number < 5 else 1.0))
        sessions.publish(FeedbackGiven(f"g{number}", turn, "anna", 1.0))  # each grade counts once
        sessions.publish(FeedbackGiven(f"h{number}", turn, "ben", -1.0))  # and nobody else's word

    figures = sessions.fold.state.watched.figures()
    assert figures == {
        "live_invalid_calls": 0.0,
        "live_questions": 0.5,
        "live_disagreement": 0.25,
        "rewards_clipped": 0.0,
    }


def test_a_user_who_speaks_before_the_judge_agrees_or_not_as_one_who_speaks_behind_it():
    sessions = Sessions()
    for number in range(16):
        turn, score = f"t{number}", -1.0 if number < 4 else 1.0
        sessions.started(turn).publish(finished(turn)).publish(FeedbackGiven(f"f{number}", turn, "anna", score))
        if number % 2:
            sessions.decide()
            assert turn not in sessions.fold.state.turns, "it is admitted"
        sessions.publish(judged(turn, 1.0))

    assert sessions.fold.state.watched.figures()["live_disagreement"] == 0.25


def test_open_turns_whose_key_is_erased_end_as_purged_wherever_they_stand():
    fold = Sessions()
    fold.started("t1", secret="k1").served("t2", secret="k1").served("t3", secret="k2", older="k1")
    fold.served("t4", secret="k2")

    made = fold.publish(purge("k1")).decide()

    assert {(one.turn_id, one.reason) for one in made} == {(name, "purged") for name in ("t1", "t2", "t3")}
    assert fold.finished("t1").decide() == []


def test_a_turn_that_comes_under_an_erased_key_ends_and_so_does_one_that_its_judge_could_not_read():
    fold = Sessions()
    fold.publish(purge("k1")).served("t1", secret="k1")
    assert [one.reason for one in fold.decide()] == ["purged"]
    fold.served("t2", secret="k2").served("t3", "t2", secret="k2")
    fold.decide()

    made = fold.publish(TurnJudged("t2", None, "rule", purged=True)).decide()

    assert [(one.turn_id, one.reason) for one in made] == [("t2", "purged")]


def test_the_end_of_a_turn_says_what_a_canary_is_compared_by():
    sessions = Sessions(reward=0.5)
    for name, canary, more in (("a", True, {}), ("b", False, {}), ("c", True, {"marks": ["garbage"]})):
        sessions.started(name).publish(ended(name, trial=7, canary=canary, **more))
    sessions.publish(TurnJudged("a", 1.0, "rule")).publish(FeedbackGiven("f", "b", "anna", -0.25))

    ends = {end.turn_id: end for end in sessions.decide()}
    assert {name: (end.trial, end.canary, end.reward) for name, end in ends.items()} == {
        "a": (7, True, 0.5),
        "b": (7, False, -0.25),
        "c": (7, True, -0.5),  # garbage has the least reward: no judge sees it
    }
    assert isinstance(ends["c"], TurnSkipped)
    untrained = Sessions(share=0.0)
    untrained.started("a").publish(ended("a", trial=7)).publish(TurnJudged("a", 1.0, "rule"))
    assert untrained.decide() == [TurnSkipped("a", "s", "off", trial=7, reward=1.0, version=2)]
