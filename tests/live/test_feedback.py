"""Bodies of `POST /v1/feedback`, and the ids that make repeats harmless."""

import json
from typing import Any

import pytest

from asyncrl.live.apis.schema import LiveError
from asyncrl.live.feedback import TEXT_CHARS, Opinion, feedback_id, opinions_of, parse_feedback


def parsed(**fields: Any) -> Opinion:
    return parse_feedback(json.dumps(fields).encode())


@pytest.mark.parametrize("turn", ["ab12", "chatcmpl-ab12", "resp_ab12", "msg_ab12"])
def test_a_turn_is_named_by_the_id_that_its_api_gave(turn: str):
    assert parsed(turn=turn, thumb="down", text="why?") == Opinion("ab12", -1.0, "why?")


def test_a_number_or_a_thumb_is_the_score():
    assert [parsed(turn="a", **one).score for one in ({"thumb": "up"}, {"number": 0}, {"number": -0.5})] == [1, 0, -0.5]


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"thumb": "up"}, "turn", "absent"),
        ({"turn": "../turn", "thumb": "up"}, "turn", "expected the id of a reply"),
        ({"turn": "a.b", "thumb": "up"}, "turn", "expected the id of a reply"),
        ({"turn": "a", "thumb": "sideways"}, "thumb", 'expected "up" or "down"'),
        ({"turn": "a", "thumb": ["up"]}, "thumb", 'expected "up" or "down"'),
        ({"turn": "a"}, "thumb", "expected one of the two"),
        ({"turn": "a", "text": "good"}, "thumb", "expected one of the two"),
        ({"turn": "a", "thumb": "up", "number": 1}, "thumb", "expected one of the two"),
        ({"turn": "a", "number": 1.5}, "number", "from -1.0 to 1.0"),
        ({"turn": "a", "number": True}, "number", "from -1.0 to 1.0"),
        ({"turn": "a", "thumb": "up", "text": "x" * (TEXT_CHARS + 1)}, "text", "at most 4000 characters"),
        ({"turn": "a", "thumb": "up", "score": 1}, "score", "not supported"),
    ],
)
def test_what_is_no_feedback_is_refused_with_its_field(fields: dict[str, Any], field: str, words: str):
    with pytest.raises(LiveError, match=words) as error:
        parsed(**fields)
    assert (error.value.fault, error.value.field) == ("invalid", field)


def test_what_is_no_object_is_refused():
    with pytest.raises(LiveError, match="send a JSON object"):
        parse_feedback(b"[1]")


def test_an_opinion_has_one_id_behind_the_same_one():
    up, down = Opinion("a", 1.0), Opinion("a", -1.0)

    assert feedback_id(up, "") == feedback_id(Opinion("a", 1.0, ""), "")
    assert (
        len({feedback_id(up, ""), feedback_id(down, ""), feedback_id(up, "x"), feedback_id(Opinion("b", 1.0), "")}) == 4
    )


def test_a_session_is_named_instead_of_a_turn():
    assert parsed(session="my task", thumb="up") == Opinion("", 1.0, "", "my task")
    with pytest.raises(LiveError, match="turn and session: expected one of the two"):
        parsed(session="my task", turn="a", thumb="up")


def test_feedback_on_a_session_counts_less_for_each_turn_before_the_last():
    opinion = Opinion("", -1.0, "wrong file", "my task")

    assert opinions_of(opinion, ["a", "b", "c"], 0.5) == [
        Opinion("a", -0.25),
        Opinion("b", -0.5),
        Opinion("c", -1.0, "wrong file"),
    ]
    assert [one.score for one in opinions_of(opinion, ["a", "b"], 1.0)] == [-1.0, -1.0]
    assert [one.score for one in opinions_of(opinion, ["a", "b"], 0.0)] == [0.0, -1.0]
