"""Stores what the gateway states of its turns; while the NATS server is away, it waits in memory, up to a bound."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from typing import Any, TypeAlias

from actors.runtime.actor import Context
from asyncrl.bus.errors import BusGone, WrongSequence
from asyncrl.bus.publish import EXPECT_SUBJECT, pack, publish, send
from asyncrl.bus.vault import SecretGone
from asyncrl.live.turn_log import TurnLog
from topics.secrets import SecretMade
from topics.table import topic_for
from topics.turns import SessionLeft, TurnCounted, TurnFinished, TurnSampled, TurnStarted
from topics.wire import Message

_PATIENCE_S = 2.0  # for an acknowledgement, before a client waits no longer for it
_LOST = 65_536  # turns, more than histories are kept of
_ANYWAY_BYTES = 16 * 2**20  # of facts that wait beyond the bound of the others
_HEAD_BYTES = 256  # of a fact that waits, besides its body

Fact: TypeAlias = TurnStarted | TurnFinished | TurnCounted | SessionLeft | SecretMade


class Facts:
    """Stores each fact once, those of one turn in their order.

    A subject of a turn's topics takes one message, the first: so a repeat is harmless however late it comes, also where
    the server stored a fact and died before it said so.
    """

    def __init__(self, context: Context, log: TurnLog, *, most_bytes: int) -> None:
        """
        Args:
            log: takes each fact at once.
            most_bytes: of all facts that wait.
        """
        self._context = context
        self._log = log
        self._most = most_bytes
        self._bytes = 0
        self._waiting: deque[tuple[Message, int]] = deque()  # with their bytes
        self._lost: OrderedDict[str, None] = OrderedDict()  # turns that are not stored as they were, the newest
        self._storing: asyncio.Task[None] | None = None

    async def put(self, fact: Fact, *, anyway: bool = False) -> bool:
        """Store a fact, now or later; False where it is lost, for too much waits already.

        Args:
            anyway: though much waits; of small facts that end what is stored.
        """
        if isinstance(fact, TurnStarted | TurnFinished):
            self.know(fact)
        if not self._waiting and self._context.bus.client.is_connected:
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await self._store(fact)
                    return True
            except (TimeoutError, BusGone):
                self._context.log.warning("facts wait for the server", topic=topic_for(fact).name)
        size = _HEAD_BYTES + len(pack(fact, topic_for(fact)))
        if self._bytes + size > self._most + (_ANYWAY_BYTES if anyway else 0):
            self._context.count("facts_lost" if anyway else "turns_unrecorded")
            if isinstance(fact, TurnStarted | TurnFinished):
                self._lost[fact.turn_id] = None
                while len(self._lost) > _LOST:
                    self._lost.popitem(last=False)
            return False
        self._waiting.append((fact, size))
        self._add(size)
        if self._storing is None or self._storing.done():
            self._storing = self._context.tasks.start(self._store_waiting())
        return True

    def has(self, turn: str) -> bool:
        """Return whether a turn is stored or will be, and can be read, so that a stored prompt may begin with it."""
        return turn not in self._lost and self._log.secrets_of(turn) is not None

    def data_key(self, secret: str) -> bytes | None:
        """Return the data key of a turn under way; None of a private one, or where it was erased meanwhile."""
        with contextlib.suppress(SecretGone):
            return self._context.bus.vault.get(secret)
        return None

    def secrets_of(self, turn: str) -> str:
        """Return the data keys that reading a turn takes; "" for none."""
        return self._log.secrets_of(turn) or ""

    def know(self, fact: TurnStarted | TurnFinished, *, owner: str = "") -> None:
        """Know a fact that is not stored.

        Args:
            owner: who may go on with a turn that begins; "": its tenant.
        """
        self._log.take(fact, self._context.bus.name, time.time(), owner=owner)

    async def progress(self, sampled: TurnSampled) -> None:
        """Store tokens of a reply under way; nobody waits for it, and while the server is away they are left out."""
        if not self._waiting:
            with contextlib.suppress(SecretGone):
                await send(self._context.bus, sampled)

    async def close(self, within_s: float) -> None:
        """Store what waits, as much as is stored in time; the rest is lost, and the log says so."""
        if self._storing is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._storing, within_s)
        if self._waiting:
            self._context.log.error("facts are lost", facts=len(self._waiting))

    async def _store_waiting(self) -> None:
        while self._waiting:
            fact, size = self._waiting[0]
            with contextlib.suppress(BusGone):  # asked again: it has waited for long
                await self._store(fact)
                self._waiting.popleft()
                self._add(-size)
            if self._context.bus.ended_by is not None:
                return

    async def _store(self, fact: Message) -> None:
        headers: dict[str, Any] = {} if topic_for(fact).repeats else {EXPECT_SUBJECT: "0"}
        try:
            with contextlib.suppress(WrongSequence):  # it is there
                await publish(self._context.bus, fact, headers=headers)
        except SecretGone:  # purged meanwhile: nobody could read it
            self._context.count("facts_purged")

    def _add(self, size: int) -> None:
        self._bytes += size
        self._context.vitals["facts_waiting"] = len(self._waiting)
