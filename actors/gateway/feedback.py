"""Takes the feedback of users on replies: stored once, and only on turns of the user's own tenant."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from actors.gateway.turn_store import TurnStore
from asyncrl.background import all_of
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError, BusGone
from asyncrl.bus.key_cache import SecretGone
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import publish, read
from asyncrl.live.apis.schema import LiveError
from asyncrl.live.feedback import Opinion, feedback_body, feedback_id, opinions_of
from asyncrl.live.redaction import RedactionFailed
from asyncrl.live.sessions import SESSION_HEADER, session_of
from asyncrl.live.tenant_keys import covers, tenant_digest
from topics.turns import FEEDBACK_GIVEN, TURN_STARTED, FeedbackGiven
from topics.wire import SEALED

_LIMIT_S = 5.0  # for the NATS server to answer
_AT_ONCE = 16  # opinions of the turns of a session
_WAITING = 4096  # turns of which the newest opinion that waits is remembered


class Opinions:
    """Stores opinions. While the server is unreachable, or facts wait to be stored, an opinion on a turn that this
    gateway knows waits until the turn and its earlier opinions are stored."""

    def __init__(
        self, bus: Bus, facts: TurnStore, caught_up: Callable[[], Awaitable[bool]], *, discount: float
    ) -> None:
        """
        Args:
            caught_up: waits for what other gateways have stored.
            discount: of `opinions_of`.
        """
        self._bus, self._facts = bus, facts
        self._caught_up, self._discount = caught_up, discount
        self._waiting: OrderedDict[str, FeedbackGiven] = OrderedDict()  # the newest of each turn

    async def give(self, tenant: str, opinion: Opinion) -> dict[str, Any]:
        """Store an opinion, of a session as one of each of its turns, and return the answer to the client.

        Raises:
            LiveError: there is no such turn or session, it is another tenant's, or it cannot be stored now.
        """
        if not opinion.session:
            return feedback_body(await self._give(tenant, opinion), opinion)
        await self._caught_up()
        session = session_of(tenant, {SESSION_HEADER: opinion.session}, "", "").id
        turns = self._facts.turns_of(session)
        if not turns:
            words = f"no turn of the session {opinion.session!r} is known; {SESSION_HEADER} of a reply is its name"
            raise LiveError("overloaded" if self._facts.waits_elsewhere else "absent", words, field="session")
        opinions = opinions_of(opinion, turns, self._discount)
        for begin in range(0, len(opinions), _AT_ONCE):
            await all_of(*(self._give(tenant, one) for one in opinions[begin : begin + _AT_ONCE]))
        return feedback_body(feedback_id(opinion, session), opinion, opinions)

    async def _give(self, tenant: str, opinion: Opinion) -> str:
        """Store an opinion and return its id; one that repeats the newest of its turn is stored already.

        Raises:
            LiveError: there is no such turn, it is another tenant's, or it cannot be stored now.
        """
        try:
            if self._facts.redactor is not None and opinion.text:
                (text,) = await self._facts.redactor.texts([opinion.text])
                opinion = msgspec.structs.replace(opinion, text=text)
            return await self._stored(tenant, opinion)
        except SecretGone as error:
            words = f"the reply {opinion.turn} was purged; there is nothing left to judge"
            raise LiveError("absent", words, field="turn") from error
        except (TimeoutError, BusError, RedactionFailed) as error:
            raise LiveError("overloaded", "the feedback cannot be stored now; try again later") from error

    async def _stored(self, tenant: str, opinion: Opinion) -> str:
        """Store an opinion now, or after the facts that wait; raises as `_follow` if its turn is not known here."""
        if self._facts.has(opinion.turn) and (self._facts.waits or not self._bus.client.is_connected):
            return await self._wait(tenant, opinion)
        self._waiting.pop(opinion.turn, None)  # it is stored, and no more the newest
        given = None
        try:
            async with asyncio.timeout(_LIMIT_S):
                before, given = await self._follow(tenant, opinion)
                if given is not before:
                    await publish(self._bus, given)
                return given.feedback_id
        except (TimeoutError, BusGone):
            if not self._facts.has(opinion.turn):
                raise
        return await self._wait(tenant, opinion, given)

    async def _follow(self, tenant: str, opinion: Opinion) -> tuple[FeedbackGiven | None, FeedbackGiven]:
        """Return the newest stored opinion of a turn, and the opinion after it; both are the same if the new one
        repeats it."""
        bus, waited = self._bus, self._facts.waits or self._facts.waits_elsewhere
        started = await read_last(bus, TURN_STARTED, opinion.turn)
        if started is None and waited:
            raise LiveError("overloaded", f"the reply {opinion.turn} may not be stored yet; try again later")
        if started is None:
            raise LiveError("absent", f"there is no reply with the id {opinion.turn}", field="turn")
        if started.headers.get("tenant") != tenant:
            raise _foreign(opinion)
        record = await read_last(bus, FEEDBACK_GIVEN, opinion.turn)
        before = None if record is None else await read(bus, FeedbackGiven, record)
        return before, _behind(before, tenant, opinion, started.headers.get(SEALED, ""))

    async def _wait(self, tenant: str, opinion: Opinion, given: FeedbackGiven | None = None) -> str:
        """Let an opinion wait to be stored after the waiting facts of its turn. Opinions from before the server became
        unreachable are not known: an opinion that repeats one is stored again, and changes nothing.

        Args:
            given: the opinion as it was sent, where the server may have stored it without an answer: its repeat has the
                same id, by which the server knows it.
        """
        secret, _, _older = self._facts.secrets_of(opinion.turn).partition(",")
        if not secret:
            raise LiveError("absent", f"there is no reply with the id {opinion.turn}", field="turn")
        if not covers(secret, tenant_digest(tenant), ""):
            raise _foreign(opinion)
        if not self._facts.waits:
            self._waiting.clear()
        before = self._waiting.get(opinion.turn)
        given = given or _behind(before, tenant, opinion, secret)
        if given is not before:
            if not await self._facts.put(given, anyway=True):
                raise LiveError("overloaded", "the feedback cannot be stored now; try again later")
            self._waiting[opinion.turn] = given
            if len(self._waiting) > _WAITING:
                self._waiting.popitem(last=False)
        return given.feedback_id


def _behind(before: FeedbackGiven | None, tenant: str, opinion: Opinion, secret: str) -> FeedbackGiven:
    """Return an opinion that follows the newest one of its turn, or the newest one if the opinion repeats it."""
    if before is not None and (before.score, before.text) == (opinion.score, opinion.text):
        return before
    identity = feedback_id(opinion, before.feedback_id if before is not None else "")
    return FeedbackGiven(identity, opinion.turn, tenant, opinion.score, opinion.text, secret)


def _foreign(opinion: Opinion) -> LiveError:
    return LiveError("forbidden", f"the reply {opinion.turn} was given to another tenant", field="turn")
