"""A server's clock that was ahead and is set back delays no session, no judge and no sibling by the difference."""

from harness.session_feed import IDLE_S, JUDGE_S, SIBLINGS_S, Sessions, admitted, ready, skipped
from topics.turns import SessionClosed, TurnJudged

DAY_S = 86_400.0


def test_sessions_of_the_time_ahead_and_those_behind_them_end():
    sessions = Sessions().served("a", at_s=DAY_S)
    sessions.started("b", session="t", at_s=5.0).finished("b", session="t", at_s=5.0)

    assert sessions.decide(at_s=6.0) == []
    assert sessions.fold.next_deadline() == 6.0 + IDLE_S
    assert sessions.decide(at_s=6.0 + IDLE_S) == [
        ready("a"),
        ready("b", session="t"),
        SessionClosed(session_id="s", reason="idle", until=2),
        SessionClosed(session_id="t", reason="idle", until=4),
    ]


def test_a_turn_that_became_ready_in_the_time_ahead_ends_without_a_grade():
    sessions = Sessions().served("a", at_s=DAY_S).started("b", "a", at_s=DAY_S)

    assert sessions.decide(at_s=DAY_S) == [ready("a", "b")]
    assert sessions.decide(at_s=6.0) == []
    assert sessions.decide(at_s=6.0 + JUDGE_S) == [skipped("a", "unjudged")]


def test_a_graded_turn_waits_for_its_siblings_no_longer():
    sessions = Sessions().served("a", siblings="x", at_s=DAY_S).served("b", siblings="x", at_s=DAY_S)
    sessions.publish(TurnJudged(turn_id="a", reward=1.0, judge="j"), at_s=DAY_S)

    assert sessions.decide(at_s=6.0) == []
    assert sessions.decide(at_s=6.0 + SIBLINGS_S) == [admitted("a", 1.0)]
