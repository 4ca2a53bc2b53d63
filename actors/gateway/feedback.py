"""Takes the feedback of users on replies: stored once, and only on turns of their own tenant."""

from __future__ import annotations

import asyncio

import msgspec

from actors.gateway.facts import Facts
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import publish, read
from asyncrl.bus.vault import SecretGone
from asyncrl.live.apis.words import LiveError
from asyncrl.live.feedback import Opinion, feedback_id
from asyncrl.live.redaction import RedactionFailed
from topics.topic import TURNS
from topics.turns import FEEDBACK_GIVEN, TURN_STARTED, FeedbackGiven
from topics.wire import SEALED

_LIMIT_S = 5.0  # for the NATS server to answer


async def give_feedback(bus: Bus, tenant: str, opinion: Opinion, facts: Facts) -> str:
    """Store an opinion and return its id; one that repeats the newest of its turn is stored already.

    Raises:
        LiveError: there is no such turn, it is another tenant's, or it cannot be stored now.
    """
    try:
        if facts.redactor is not None and opinion.text:
            (text,) = await facts.redactor.texts([opinion.text])
            opinion = msgspec.structs.replace(opinion, text=text)
        async with asyncio.timeout(_LIMIT_S):
            return await _store(bus, tenant, opinion, facts)
    except SecretGone as error:
        words = f"the reply {opinion.turn} was purged; there is nothing left to judge"
        raise LiveError("absent", words, field="turn") from error
    except (TimeoutError, BusError, RedactionFailed) as error:
        raise LiveError("overloaded", "the feedback cannot be stored now; try again later") from error


async def _store(bus: Bus, tenant: str, opinion: Opinion, facts: Facts) -> str:
    waited = facts.waits
    started = await read_last(bus, TURNS, TURN_STARTED.subject(bus.run, opinion.turn))
    if started is None and waited:
        raise LiveError("overloaded", f"the reply {opinion.turn} may not be stored yet; try again later")
    if started is None:
        raise LiveError("absent", f"there is no reply with the id {opinion.turn}", field="turn")
    if started.headers.get("tenant") != tenant:
        raise LiveError("forbidden", f"the reply {opinion.turn} was given to another tenant", field="turn")
    record = await read_last(bus, TURNS, FEEDBACK_GIVEN.subject(bus.run, opinion.turn))
    newest = None if record is None else await read(bus, FeedbackGiven, record)
    if newest is not None and (newest.score, newest.text) == (opinion.score, opinion.text):
        return newest.feedback_id
    identity = feedback_id(opinion, newest.feedback_id if newest is not None else "")
    secret = started.headers.get(SEALED, "")
    await publish(bus, FeedbackGiven(identity, opinion.turn, tenant, opinion.score, opinion.text, secret))
    return identity
