"""Tokens trained of a live turn are those that the gateway stored: all else is found."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncrl.bus.log import Record
from asyncrl.live.rows import live_rows
from asyncrl.state.audit.live import Live
from asyncrl.state.audit.opening import Opening
from asyncrl.state.audit.violations import Violation, Violations
from topics.batches import BatchGroup, BatchMember, BatchPacked
from topics.prompts import PromptIssued
from topics.table import BUILT_IN
from topics.trajectories import Outcome, Reference, Segment, TrajectoryGenerated
from topics.turns import (
    FeedbackGiven,
    Sibling,
    TurnAdmitted,
    TurnFinished,
    TurnFinishedHeaders,
    TurnJudged,
    TurnOverruled,
    TurnShadowed,
    TurnSkipped,
    TurnStarted,
    TurnStartedHeaders,
)
from topics.wire import Message

REPLY = np.array([7, 8], np.int32)
LOGPROBS = np.array([-0.5, -1.5], np.float32)
VERSIONS = np.array([3, 4], np.int32)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def admitted(turn: str, reward: float = 0.5) -> TurnAdmitted:
    return TurnAdmitted(turn_id=turn, session="s", tenant="anna", reward=reward, by="judge", temperature=1.0)


def generated(number: int, tokens: np.ndarray, **fields) -> TrajectoryGenerated:
    """The trajectory of a turn whose last two tokens are its reply."""
    before, reply = len(tokens) - 2, {"logprobs": LOGPROBS, "versions": VERSIONS, "mask": np.ones(2, np.uint8)}
    reply |= {name: value for name, value in fields.items() if name in reply}
    rest = {"logprobs": np.zeros(before, np.float32), "versions": np.full(before, -1, np.int32)}
    rest["mask"] = np.zeros(before, np.uint8)
    segment = Segment(tokens, **{name: np.concatenate([rest[name], value]) for name, value in reply.items()})
    prompt_id = f"l{number:06d}"
    return TrajectoryGenerated(
        trajectory_id=f"{prompt_id}-0",
        prompt_id=prompt_id,
        member=0,
        group_size=1,
        stage="rl",
        rows=[],
        segments=[segment],
        completion="",
        versions=[],
        outcome=Outcome(reward=fields.get("reward", 0.5)),
    )


def found(*messages, late: bool = False) -> list[str]:
    """Kinds of what `violations` finds."""
    return [violation.kind for violation in violations(*messages, late=late)]


def violations(
    *messages, late: bool = False, times: Mapping[int, int] = {}, logprobs: np.ndarray = LOGPROBS
) -> list[Violation]:
    """Return what is wrong where two turns of a conversation are admitted and then come these messages.

    Args:
        late: the end of the first turn is stored behind that of the second.
        times: server's clock at the messages, by number; 0 for the others.
        logprobs: [2] of each reply.
    """
    wrong = Violations()
    live = Live(Opening(wrong), wrong)
    common = {"session": "s", "tenant": "anna", "api": "chat"}
    reply = {"session": "s", "finish": "stop", "tokens": REPLY, "logprobs": logprobs, "versions": VERSIONS}
    first = TurnFinished(turn_id="a", **reply)
    told = [
        TurnStarted(turn_id="a", tokens=ids(1, 2), **common),
        *([] if late else [first]),
        TurnStarted(turn_id="b", tokens=ids(5), parent="a", known=4, **common),
        TurnFinished(turn_id="b", **reply),
        *([first] if late else []),
        TurnJudged(turn_id="a", reward=0.5, judge="words"),
        TurnJudged(turn_id="b", reward=0.5, judge="words"),
        admitted("a"),
        admitted("b"),
    ]
    for number, message in enumerate([*told, *messages]):
        topic = BUILT_IN.topic_of_type(type(message))
        live.apply(topic, message, Record(topic.stream, 1, "", {}, b"", times.get(number - len(told), 0)))
    return list(wrong)


@pytest.mark.parametrize("late", [False, True])
def test_turns_that_are_trained_as_they_were_sampled_are_clean(late: bool):
    rows = [
        PromptIssued(prompt_id=f"l00000{n}", member=0, group_size=1, rows=live_rows(admitted("ab"[n]))) for n in (0, 1)
    ]

    assert found(*rows, generated(0, ids(1, 2, 7, 8)), generated(1, ids(1, 2, 7, 8, 5, 7, 8)), late=late) == []


def test_log_probs_above_0_by_a_rounding_error_are_equal_in_turn_and_trajectory():
    rounded = np.array([3e-5, -1.5], np.float32)

    assert violations(generated(0, ids(1, 2, 7, 8), logprobs=rounded), logprobs=rounded) == []


@pytest.mark.parametrize(
    "planted",
    [
        generated(0, ids(1, 2, 7, 9)),  # an id that no engine gave
        generated(0, ids(1, 3, 7, 8)),
        generated(0, ids(1, 2, 7, 8), logprobs=np.array([-0.5, -1.0], np.float32)),
        generated(0, ids(1, 2, 7, 8), versions=ids(3, 5)),
        generated(0, ids(1, 2, 7, 8), mask=np.array([1, 0], np.uint8)),
        generated(0, ids(1, 2, 7, 8), reward=1.0),
        generated(1, ids(1, 2, 7, 8)),  # another turn's
        generated(2, ids(1, 2, 7, 8)),  # of no turn
    ],
)
def test_whatever_differs_from_the_turn_is_found(planted: TrajectoryGenerated):
    assert found(planted) == ["foreign tokens"]


def turn_that(name: str, *, finish: str = "stop", skip: str | None = None, marks: Sequence[str] = ()) -> list[Message]:
    """A third turn, which starts another conversation."""
    common = {"turn_id": name, "session": "s"}
    reply = {"tokens": REPLY, "logprobs": LOGPROBS, "versions": VERSIONS}
    return [
        TurnStarted(tokens=ids(1, 2), tenant="anna", api="chat", skip=skip, **common),
        TurnFinished(finish=finish, marks=list(marks), **common, **reply),
    ]


def judged(name: str) -> TurnJudged:
    return TurnJudged(turn_id=name, reward=0.5, judge="words")


@pytest.mark.parametrize(
    "marked",
    [{"skip": "side"}, {"skip": "greedy"}, {"finish": "gone"}, {"marks": ["garbage"]}, {"marks": ["redacted"]}],
)
def test_a_turn_that_may_not_be_trained_is_not_admitted(marked: dict[str, Any]):
    assert found(*turn_that("c"), judged("c"), admitted("c")) == []
    assert found(*turn_that("c", **marked), judged("c"), admitted("c")) == ["not to be trained"]


def test_a_turn_of_which_the_gateway_stored_nothing_or_no_end_is_not_admitted():
    assert found(judged("c"), admitted("c")) == ["unknown turn"]
    assert found(turn_that("c")[0], judged("c"), admitted("c")) == ["unknown turn"]


def test_the_headers_of_turns_are_enough_to_compare_their_ends():
    started, finished = turn_that("c", skip="side")
    headers = [TurnStartedHeaders.of(started), TurnFinishedHeaders.of(finished)]

    assert found(*headers, judged("c"), admitted("c")) == ["not to be trained"]


def test_a_turn_has_one_end():
    skipped = TurnSkipped(turn_id="a", session="s", reason="behind")

    assert found(skipped) == found(skipped, skipped)[:1] == ["ended twice"]
    assert found(*turn_that("c"), judged("c"), msgspec.structs.replace(skipped, turn_id="c"), admitted("c")) == [
        "ended twice"
    ]


def test_a_turn_is_graded_before_it_is_admitted():
    told = [*turn_that("c"), judged("c"), admitted("c")]

    assert [wrong.kind for wrong in violations(*told, times={2: 5, 3: 5})] == []
    assert [wrong.kind for wrong in violations(*told, times={2: 6, 3: 5})] == ["graded late"]


def test_a_turn_is_admitted_once_and_issued_with_its_reward():
    rows = live_rows(admitted("a", reward=1.0))

    assert found(admitted("a")) == ["admitted twice"]
    assert found(*turn_that("c"), admitted("c")) == ["wrong rewards"]  # nobody graded it
    assert found(PromptIssued(prompt_id="l000000", member=0, group_size=1, rows=rows)) == ["wrong row"]
    assert found(msgspec.structs.replace(generated(0, ids(1, 2, 7, 8)), segments=[])) == ["foreign tokens"]


def test_a_reward_that_differs_from_its_grade_is_one_that_its_user_wanted():
    def batch(reward: float) -> BatchPacked:
        member = BatchMember("l000000-0", 0, Reference(1, "0" * 16, 1), reward, 2, overruled=True)
        return BatchPacked(1, "rl", [BatchGroup("l000000", [member])], 0)

    wanted = TurnOverruled(turn_id="a", prompt_id="l000000", reward=-1.0)
    said = FeedbackGiven(feedback_id="f", turn_id="a", tenant="anna", score=-1.0)

    assert found(said, wanted, batch(-1.0)) == []
    assert found(said, wanted, batch(1.0)) == ["wrong rewards"]
    assert found(batch(-1.0)) == ["wrong rewards"]


@pytest.mark.parametrize(
    ("tenant", "turn", "score", "overruled"),
    [
        ("ben", "a", -1.0, "a"),  # another tenant's word
        ("anna", "b", -1.0, "a"),  # about another turn
        ("anna", "a", 1.0, "a"),  # another score
        ("anna", "b", -1.0, "b"),  # another turn than the prompt's
    ],
)
def test_a_turn_is_overruled_by_what_its_own_tenant_said_of_it(tenant: str, turn: str, score: float, overruled: str):
    said = FeedbackGiven(feedback_id="f", turn_id=turn, tenant=tenant, score=score)

    assert found(said, TurnOverruled(turn_id=overruled, prompt_id="l000000", reward=-1.0)) == ["wrong rewards"]


def test_a_shadow_answer_that_is_trained_is_found_and_named():
    [wrong] = violations(TurnShadowed(turn_id="a", trial=1, tokens=ids(7, 9)), generated(0, ids(1, 2, 7, 9)))

    assert wrong.kind == "foreign tokens" and "the shadow answer" in wrong.found


def test_replies_to_one_prompt_are_one_group_and_others_are_not():
    said = {"session": "s", "tenant": "anna", "api": "chat", "tokens": ids(1, 2)}
    reply = {"session": "s", "finish": "stop", "tokens": REPLY, "logprobs": LOGPROBS, "versions": VERSIONS}
    told = [
        message
        for turn, siblings in (("c", "1" * 16), ("d", "1" * 16), ("e", "2" * 16))
        for message in (
            TurnStarted(turn_id=turn, siblings=siblings, **said),
            TurnFinished(turn_id=turn, **reply),
            TurnJudged(turn_id=turn, reward=0.5, judge="words"),
        )
    ]

    def group(first: str, second: str) -> TurnAdmitted:
        made = admitted(first)
        made.siblings = [Sibling(second, "s", 0.5, "judge")]
        return made

    def member(number: int) -> TrajectoryGenerated:
        made = generated(2, ids(1, 2, 7, 8))
        made.member, made.trajectory_id = number, f"l000002-{number}"
        return made

    rows = live_rows(group("c", "d"))
    issued = [PromptIssued("l000002", one, 2, rows=rows if not one else []) for one in (0, 1)]
    assert found(*told, group("c", "d"), *issued, member(0), member(1)) == []
    assert found(*told, group("c", "d"), PromptIssued("l000002", 0, 2, rows=rows[:1])) == ["wrong row"]
    assert found(*told, group("c", "e")) == ["wrong row"]
    assert found(*told, group("c", "d"), member(2)) == ["foreign tokens"]
