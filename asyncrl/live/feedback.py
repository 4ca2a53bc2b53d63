"""Feedback of users on replies and on whole sessions, `POST /v1/feedback`: its body, and the answer to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash

from asyncrl.live.apis.body import Body, refusal, shown

FEEDBACK_PATH = "/v1/feedback"
TEXT_CHARS = 4000
_READ = ("turn", "session", "thumb", "number", "text")
_THUMBS = {"up": 1.0, "down": -1.0}
_ID = re.compile(r"^(?:chatcmpl-|resp_|msg_)?([0-9A-Za-z]{1,64})\Z")


class Opinion(msgspec.Struct, frozen=True):
    """A user's opinion of a reply, or of a session."""

    turn: str  # id of the turn, without what the id of its API adds; "": of a session
    score: float  # from -1 to 1
    text: str = ""
    session: str = ""  # its name; "": of a reply


def parse_feedback(raw: bytes) -> Opinion:
    """Read a body.

    Raises:
        LiveError: it is malformed; the message names the field.
    """
    fields = Body(raw)
    fields.only(_READ, (), {})
    session = "" if fields.get("session") is None else fields.text("session")
    if session and fields.get("turn") is not None:
        raise refusal("turn", "and session: expected one of the two")
    turn = "" if session else fields.text("turn")
    found = _ID.match(turn)
    if found is None and not session:
        raise refusal("turn", f"is {shown(turn)}; expected the id of a reply, as the API returned it")
    thumb, number, text = fields.get("thumb"), fields.real("number", -1.0, 1.0), fields.get("text")
    if thumb not in (None, *_THUMBS):
        raise refusal("thumb", f'is {shown(thumb)}; expected "up" or "down"')
    if (thumb is None) == (number is None):
        raise refusal("thumb", "and number: expected one of the two, which says how good the reply was")
    if text is not None and (not isinstance(text, str) or len(text) > TEXT_CHARS):
        raise refusal("text", f"is {shown(text)}; expected a text of at most {TEXT_CHARS} characters")
    score = _THUMBS[str(thumb)] if number is None else number
    return Opinion(found[1] if found else "", score, text or "", session)


def opinions_of(opinion: Opinion, turns: Sequence[str], discount: float) -> list[Opinion]:
    """Return an opinion of a session as opinions of its turns.

    Args:
        turns: of the session, in their order.
        discount: factor of the score of each turn before the last, once for each turn between.

    Returns:
        One for each turn, in their order; the last has the text.
    """
    last = len(turns) - 1
    return [
        Opinion(turn, opinion.score * discount ** (last - number), opinion.text if number == last else "")
        for number, turn in enumerate(turns)
    ]


def feedback_id(opinion: Opinion, before: str) -> str:
    """Return the id of feedback: equal for equal feedback after the same `before`, the id of the previous feedback."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([opinion.turn, before, opinion.score, opinion.text]))


def feedback_body(identity: str, opinion: Opinion, turns: Sequence[Opinion] = ()) -> dict[str, Any]:
    """Return the answer to a client.

    Args:
        turns: opinions of the turns, where the opinion is of a session.
    """
    of_turns = [{"turn": one.turn, "score": one.score} for one in turns]
    about = {"session": opinion.session, "turns": of_turns} if opinion.session else {"turn": opinion.turn}
    said = {"score": opinion.score, "text": opinion.text}
    return {"id": f"feedback_{identity}", "object": "feedback", **about, **said}
