"""The session of a request, and whether its turn may be trained."""

import re

import pytest

from asyncrl.engine.client import SamplingParams
from asyncrl.live.apis.schema import LiveError
from asyncrl.live.sessions import Session, session_of, skip_of
from topics.wire import ID_PATTERN

FIRST = "0123456789abcdef01234567"  # as ids of turns are made


def of(headers: dict[str, str], *, tenant: str = "anna", turn: str = FIRST, known: str = "") -> Session:
    return session_of(tenant, headers, turn, known)


@pytest.mark.parametrize("header", ["x-asyncrl-session", "x-session-id", "x-claude-code-session-id", "session-id"])
def test_a_header_names_the_session_ours_before_others(header: str):
    named = of({header: "mine"}, known=of({}).id)

    assert named.name == "mine"
    assert of({"x-asyncrl-session": "ours", header: "mine"}).name == (
        "mine" if header == "x-asyncrl-session" else "ours"
    )


def test_without_a_header_it_is_that_of_the_turn_before_else_a_new_one_that_can_be_named():
    first = of({})
    second = of({}, turn="t2", known=first.id)

    assert (first.name, second) == (FIRST, first)
    assert of({"x-asyncrl-session": first.name}, turn="t3") == first
    assert of({}, turn="t4") != first


def test_no_tenant_can_name_the_session_of_another():
    assert of({"x-session-id": "mine"}).id != of({"x-session-id": "mine"}, tenant="eve").id


def test_what_a_client_calls_a_session_is_repeated_to_it_and_stands_in_no_id():
    named = of({"x-session-id": "divorce-of-anna"})

    assert named.name == "divorce-of-anna" and "divorce" not in named.id
    assert of({"x-session-id": "divorce-of-anna"}, turn="t2") == named
    inferred = of({}, turn="t2", known=named.id)
    assert inferred.id == named.id == of({"x-session-id": inferred.name}).id


def test_any_name_becomes_part_of_a_subject_and_one_too_long_is_refused():
    odd = of({"x-session-id": "a b.c>*\u00e9" * 9})

    assert re.match(ID_PATTERN, odd.id)
    assert of({"x-session-id": odd.name}) == odd
    with pytest.raises(LiveError, match="has 257 characters; at most 256"):
        of({"x-session-id": "a" * 257})


def test_headers_mark_side_turns_and_the_last_one():
    assert of({"x-turn-type": "Side"}).side
    assert of({"x-asyncrl-turn-type": "side"}).side
    assert not of({"x-turn-type": "main"}).side
    assert session_of("anna", {}, FIRST, "", side=True).side
    assert not session_of("anna", {"x-turn-type": "main"}, FIRST, "", side=True).side
    assert (of({"x-session-done": "true"}).done, of({"x-session-done": "0"}).done) == (True, False)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"temperature": 0.7}, None),
        ({"temperature": 0.0}, "greedy"),
        ({"top_p": 0.9}, "truncated"),
        ({"top_k": 20}, "truncated"),
        ({"min_p": 0.1}, "truncated"),
        ({"presence_penalty": -0.5}, "penalised"),
        ({"repetition_penalty": 1.1}, "penalised"),
        ({"logit_bias": {"1": 5.0}}, "penalised"),
        ({"stop_token_ids": [1]}, None),
    ],
)
def test_a_reply_of_another_distribution_than_the_trainer_computes_is_not_trained(changes, reason):
    assert skip_of(SamplingParams(8, **changes), side=False) == reason
    assert skip_of(SamplingParams(8, **changes), side=True) == "side"
