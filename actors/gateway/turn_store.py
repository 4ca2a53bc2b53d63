"""Stores what the gateway states of its turns; while the NATS server is away, it waits on the disk, up to a bound."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from actors.runtime.actor import Context
from asyncrl.bus.errors import BusDenied, BusGone, BusRefused, WrongSequence
from asyncrl.bus.key_cache import SecretGone
from asyncrl.bus.log import Record
from asyncrl.bus.publish import EXPECT_SUBJECT, Prepared, TwoContents, prepare, publish_prepared, send
from asyncrl.live.redaction import RedactionFailed, Redactor
from asyncrl.live.spool import Spool, SpoolFault, SpoolTaken, Waiting
from asyncrl.live.stored import read_sampled
from asyncrl.live.tenant_keys import covers
from asyncrl.live.turn_log import TurnLog
from asyncrl.run.directory import is_taken
from topics.keys import TurnCounted
from topics.secrets import PURGE_REQUESTED, PurgeRequested, SecretMade
from topics.topic import ACTORS, Topic
from topics.turns import FeedbackGiven, ReplyKept, SessionLeft, TurnFinished, TurnSampled, TurnShadowed, TurnStarted
from topics.wire import SEALED

_PATIENCE_S = 2.0  # for an acknowledgement, before a client waits no longer for it
_POLL_S = 0.2  # the kernel does not announce that a lock is free
_LOST = 65_536  # turns, more than histories are kept of
_ANYWAY_BYTES = 16 * 2**20  # of facts that wait beyond the bound of the others

Fact: TypeAlias = TurnStarted | TurnFinished | TurnCounted | SessionLeft | SecretMade | FeedbackGiven | ReplyKept


class TurnStore:
    """Stores each fact once, those of one turn in their order.

    A subject of a turn's topics takes one message, the first: so a repeat is harmless however late it comes, also where
    the server stored a fact and died before it said so, or the gateway died before it had noted that.
    """

    def __init__(self, context: Context, log: TurnLog, *, most_bytes: int) -> None:
        self.redactor: Redactor | None = None  # of conversations, before they are stored
        self._context = context
        self._log = log  # it takes each fact at once
        self._most = most_bytes  # of all facts that wait
        self._name = context.bus.name  # of the spool, once it is open
        self._spool = Spool(context.files.spool / self._name)
        self._lost: OrderedDict[str, None] = OrderedDict()  # turns that are not stored as they were, the newest
        self._storing: asyncio.Task[None] | None = None
        self._left: dict[Path, Spool] = {}  # of gateways that the run has no more, locked
        self._purges: dict[str, tuple[PurgeRequested, int]] = {}  # with when each was asked for, ns since 1970

    async def start(self, within_s: float, *, follows: bool = False) -> None:
        """Store the facts that an earlier process left; facts that are not stored in time are stored later.

        Args:
            follows: such a process may live; then this one has another spool, and is known by its name.

        Raises:
            SpoolTaken: such a process lives.
        """
        try:
            self._open(follows=follows)
            self._adopt()
        except (OSError, SpoolFault) as error:
            self._failed(SpoolFault(f"the spool cannot be opened: {error}"))
        if self._spool.damaged:
            self._context.log.error("facts in the spool are damaged, and lost", facts=self._spool.damaged)
            self._context.count("facts_lost", self._spool.damaged)
        if len(self._spool):
            self._context.log.info("facts of the process before this one wait", facts=len(self._spool))
            self._store_soon()
            assert self._storing is not None
            await asyncio.wait([self._storing], timeout=within_s)

    def _open(self, *, follows: bool) -> None:
        """Open the first spool of this gateway that no living process has: `gateway-1`, then `gateway-1.1`."""
        for number in itertools.count(1):
            try:
                return self._spool.open()
            except SpoolTaken:
                if not follows:
                    raise
                self._context.bus.name = f"{self._name}.{number}"
                self._spool = Spool(self._context.files.spool / self._context.bus.name)

    def _adopt(self) -> None:
        """Take over what waits for dead processes: earlier ones of this gateway, and gateways that the run has no more.

        Their files stay locked.
        """
        gateways = range(1, self._context.config.gateway.count + 1)
        others = {f"gateway-{number}" for number in gateways} - {self._name}
        own = self._context.bus.name
        for path in self._context.files.spool.iterdir():
            if path.name == own or path in self._left or path.name.partition(".")[0] in others:
                continue
            left = Spool(path)
            try:
                left.open()
            except SpoolTaken:  # another gateway takes it over
                continue
            while len(left):  # even if it dies between the two, the server has each only once
                self._spool.add(left.first())
                left.drop_first()
            self._left[path] = left

    async def outlast(self) -> None:
        """Wait for the end of the processes before this one, and take over what waits for them."""
        folder, own = self._context.files.spool, self._context.bus.name
        before = [path for path in folder.iterdir() if path.name.partition(".")[0] == self._name and path.name != own]
        while any(is_taken(path) for path in before):  # noqa: ASYNC110 - see _POLL_S
            await asyncio.sleep(_POLL_S)
        self._adopt()
        if len(self._spool):
            self._store_soon()

    @property
    def departed(self) -> list[str]:
        """Return the dead gateways whose turns only this one ends."""
        return [path.name for path in self._left]

    def forget_departed(self) -> None:
        """Remove their files, by which a start after this one would find them again."""
        for path, left in self._left.items():
            path.unlink(missing_ok=True)
            left.close()
        self._left.clear()

    async def put(self, fact: Fact, *, anyway: bool = False) -> bool:
        """Store a fact, now or later; False if it is lost because too many facts wait already.

        Args:
            anyway: even if many facts wait; for small facts that end a stored turn or session.
        """
        if isinstance(fact, TurnStarted | TurnFinished):
            if isinstance(fact, TurnStarted):
                self.know(fact)
            redacted = await self._redacted(fact)
            if isinstance(fact, TurnFinished):  # not before: no turn may follow one that is then stored redacted
                self.know(fact)
            if redacted is None:
                return False
            fact = redacted
        try:
            if not self._at_hand(fact):
                return self._lose(fact, anyway=anyway)
            repeats = self._context.bus.tables.topic_for(fact).repeats
            several = repeats or isinstance(fact, FeedbackGiven)  # of one subject
            if isinstance(fact, ReplyKept) and fact.body:  # a retry stores it if the gateway died before it could
                several = False
            headers: dict[str, str] = {} if several else {EXPECT_SUBJECT: "0"}
            prepared = await prepare(self._context.bus, fact, headers=headers)
        except SecretGone:  # purged since: no reader could open it
            self._context.count("facts_purged")
            return True
        if not len(self._spool) and self._context.bus.client.is_connected:
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    return await self._store(prepared) or self._lose(fact, anyway=anyway)
            except (TimeoutError, BusGone):
                self._context.log.warning("facts wait for the server", topic=prepared.topic)
        if self._spool.taken + len(prepared.body) > self._most + (_ANYWAY_BYTES if anyway else 0):
            return self._lose(fact, anyway=anyway)
        try:
            self._spool.add(Waiting(time.time_ns(), prepared))
        except SpoolFault as fault:
            self._failed(fault)
            return self._lose(fact, anyway=anyway)
        self._store_soon()
        return True

    async def _redacted(self, fact: TurnStarted | TurnFinished) -> TurnStarted | TurnFinished | None:
        """Return a fact with its text redacted; None if the redaction fails."""
        if self.redactor is None:
            return fact
        try:
            stored = await self.redactor.turn(fact)
        except RedactionFailed as error:
            self._context.log.error("nothing of a turn is stored", turn=fact.turn_id, reason=str(error))
            self._context.count("redactions_failed")
            self._note_lost(fact.turn_id)
            return None
        if stored is not fact:
            self._note_lost(fact.turn_id)
        if fact.turn_id in self._lost and isinstance(stored, TurnFinished):  # no prompt may begin with its tokens
            return msgspec.structs.replace(stored, history="", routing=None)
        return stored

    def _at_hand(self, fact: Fact) -> bool:
        """Return whether a fact can be sealed now; raises `SecretGone` if it never can be."""
        secret = getattr(fact, SEALED, "")
        return not secret or self._context.bus.client.is_connected or self._context.bus.vault.get(secret) is not None

    def _lose(self, fact: Fact, *, anyway: bool) -> bool:
        self._context.count("facts_lost" if anyway else "turns_unrecorded")
        if isinstance(fact, TurnStarted | TurnFinished):
            self._note_lost(fact.turn_id)
        return False

    def _note_lost(self, turn: str) -> None:
        self._lost[turn] = None
        while len(self._lost) > _LOST:
            self._lost.popitem(last=False)

    def _failed(self, fault: SpoolFault) -> None:
        self._context.vitals["spool_failed"] = 1
        self._context.log.error("the spool fails", reason=str(fault))

    def _store_soon(self) -> None:
        self._context.vitals["facts_waiting"] = len(self._spool)
        if self._storing is None or self._storing.done():
            self._storing = self._context.tasks.start(self._store_waiting())

    @property
    def waits(self) -> bool:
        """Return whether facts wait to be stored."""
        return len(self._spool) > 0

    @property
    def waits_elsewhere(self) -> bool:
        """Return whether facts of other gateways, which share the directory, wait to be stored."""
        folder, own = self._context.files.spool, self._context.bus.name
        with contextlib.suppress(FileNotFoundError):  # another gateway has just taken it over
            return any(path.stat().st_size for path in folder.iterdir() if path.name != own)
        return False

    def is_gone(self, gateway: str) -> bool:
        """Return whether another gateway, which shares port and directory, is dead: nothing has its spool open."""
        path = self._context.files.spool / gateway
        return gateway != self._context.bus.name and path.exists() and not is_taken(path)

    def turns_of(self, session: str) -> list[str]:
        """Return the turns of a session that feedback on it applies to, in their order."""
        return self._log.turns_of(session)

    def has(self, turn: str) -> bool:
        """Return whether a turn is stored or will be, and can be read, so that a stored prompt may begin with it."""
        return turn not in self._lost and self._log.secrets_of(turn) is not None

    def data_key(self, secret: str) -> bytes | None:
        """Return the data key of a running turn; None for a private turn, or if the key was erased since."""
        with contextlib.suppress(SecretGone):
            return self._context.bus.vault.get(secret)
        return None

    def secrets_of(self, turn: str) -> str:
        """Return the data keys that reading a turn takes; "" for none."""
        return self._log.secrets_of(turn) or ""

    def know(self, fact: TurnStarted | TurnFinished, *, owner: str = "") -> None:
        """Know a fact that is not stored.

        Args:
            owner: user who may continue a turn that begins; "": its tenant.
        """
        self._log.take(fact, self._context.bus.name, time.time(), owner=owner)

    async def progress(self, sampled: TurnSampled) -> None:
        """Store tokens of a running reply; no caller waits for it.

        While the server is away, or where the reply is to be redacted, they are left out.
        """
        if not len(self._spool) and self.redactor is None:
            with contextlib.suppress(SecretGone):
                await send(self._context.bus, sampled)

    async def recall(self, turn: str) -> None:
        """Fold in the stored tokens of a running reply that another process began. No reader follows these tokens, as
        they are of use only if that process is gone."""
        for sampled in await read_sampled(self._context.bus, turn):
            self._log.take(sampled, "", 0.0)

    async def aside(self, shadowed: TurnShadowed) -> bool:
        """Store a shadow answer; False if the server is unreachable, or the answer is to be redacted or purged."""
        if len(self._spool) or not self._context.bus.client.is_connected:
            return False
        try:
            if self.redactor is not None and await self.redactor.redacted(shadowed.tokens) is not None:
                return False
            async with asyncio.timeout(_PATIENCE_S):
                await self._store(await prepare(self._context.bus, shadowed, headers={EXPECT_SUBJECT: "0"}))
        except (TimeoutError, SecretGone, RedactionFailed, BusGone):
            return False
        return True

    async def close(self, within_s: float) -> None:
        """Store what waits, as much as is stored in time; the next process stores the rest."""
        if self._storing is not None:
            await asyncio.wait([self._storing], timeout=within_s)
            self._storing.cancel()
        if len(self._spool):
            self._context.log.warning("facts wait for the next gateway", facts=len(self._spool))
        self._spool.close()
        if self.redactor is not None:
            await self.redactor.close()

    async def _store_waiting(self) -> None:
        known = False
        while len(self._spool):
            with contextlib.suppress(BusGone):  # asked again: it has waited for long
                known = known or await self._read_purges()
                await self._store_first()
            if self._context.bus.ended_by is not None:
                return

    async def _store_first(self) -> None:
        try:
            waiting = self._spool.first()
            if self._is_purged(waiting):
                self._context.count("facts_purged")
            elif not await self._store(waiting.message):
                self._note_lost(waiting.message.key)
        except SpoolFault as fault:
            self._failed(fault)
            self._context.count("facts_lost")
        try:
            self._spool.drop_first()
        except SpoolFault as fault:
            self._failed(fault)
        self._context.vitals["facts_waiting"] = len(self._spool)

    async def _read_purges(self) -> bool:
        """Read the purges from the time when the server was unreachable: a purge does not name keys that wait here."""
        listener = self._context.listen(ACTORS, self._take_purge, [PURGE_REQUESTED])
        try:
            await listener.start()
            await listener.caught_up()
        finally:
            await listener.close()
        return True

    def _take_purge(self, _topic: Topic[Any], purge: PurgeRequested, record: Record) -> None:
        self.purge(purge, record.time_ns)

    def purge(self, purge: PurgeRequested, at_ns: int) -> None:
        """Store nothing of what waits that a purge covers; `at_ns` is when it was asked for."""
        self._purges[purge.purge_id] = purge, at_ns

    def _is_purged(self, waiting: Waiting) -> bool:
        return any(
            secret in purge.secrets or (at_ns > waiting.at_ns and covers(secret, purge.owner, purge.before))
            for secret in waiting.secrets
            for purge, at_ns in self._purges.values()
        )

    async def _store(self, prepared: Prepared) -> bool:
        """Store a prepared fact; returns whether the server has it. One that it never takes holds up no others.

        There is no dead letter of it: those are not erased by a purge, and it may be a data key.

        Raises:
            BusGone: the server is away.
        """
        try:
            await publish_prepared(self._context.bus, prepared)
        except WrongSequence:
            return True  # it was there
        except (BusDenied, BusRefused, TwoContents) as error:
            if (ended := self._context.bus.ended_by) is not None:  # the login, and not this fact: it waits
                raise BusGone(str(ended)) from error
            self._context.log.error("a fact is refused", topic=prepared.topic, key=prepared.key, reason=str(error))
            self._context.count("facts_refused")
            return False
        return True
