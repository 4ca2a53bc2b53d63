"""Conversations of a tenant as text, read from the log of turns."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import Record
from asyncrl.bus.merged_reader import Part, read_merged
from topics.topic import TURNS, Topic
from topics.turns import FEEDBACK_GIVEN, TURN_FINISHED, TURN_STARTED, FeedbackGiven, TurnFinished, TurnStarted
from topics.wire import Int32Array


class Opinion(msgspec.Struct):
    """One feedback on a reply."""

    score: float  # from -1 to 1
    text: str = ""


class ExportedTurn(msgspec.Struct):
    """A reply, and the part of its prompt that the turn before it does not have."""

    turn: str
    parent: str  # the turn that it continues; "": none
    session: str
    tenant: str
    api: str
    at: str  # when it began, ISO 8601 in UTC
    prompt: str  # text after the parent, as the chat template writes it
    reply: str = ""
    finish: str = ""  # "": it has not ended
    versions: list[int] = []  # of the weights that sampled the reply, each once
    feedback: list[Opinion] = []


class Exported(NamedTuple):
    """The turns of a tenant in the order of their begins, and how many messages of all tenants cannot be read."""

    turns: list[ExportedTurn]
    unreadable: int


async def exported_turns(bus: Bus, tenant: str, text_of: Callable[[list[int]], str]) -> Exported:
    """Read the turns of a tenant.

    Args:
        text_of: decodes tokens.

    Raises:
        BusGone: the server sends nothing more.
    """
    found: dict[str, ExportedTurn] = {}
    unreadable = list[int]()

    def text(tokens: Int32Array) -> str:
        return text_of(tokens.tolist())

    def take(_topic: Topic[Any], message: Any, record: Record) -> None:
        if isinstance(message, TurnStarted) and message.tenant == tenant:
            at = datetime.fromtimestamp(record.time_ns / 1e9, UTC).isoformat(timespec="milliseconds")
            place = (message.turn_id, message.parent, message.session, tenant, message.api)
            found[message.turn_id] = ExportedTurn(*place, at, text(message.tokens))
        turn = found.get(getattr(message, "turn_id", ""))
        if turn is not None and isinstance(message, TurnFinished):
            turn.reply, turn.finish = text(message.tokens), message.finish
            turn.versions = sorted({*message.versions.tolist()})
        elif turn is not None and isinstance(message, FeedbackGiven):
            turn.feedback.append(Opinion(message.score, message.text))

    topics: list[Topic[Any]] = [TURN_STARTED, TURN_FINISHED, FEEDBACK_GIVEN]
    part = Part(TURNS, subjects=[topic.pattern(bus.run) for topic in topics])
    await read_merged(bus, [part], take, lambda record, _error: unreadable.append(record.sequence))
    return Exported([*found.values()], len(unreadable))
