"""The loop of all keepers: fold the inputs and the own log, decide, append with compare-and-set, read back.

A decision takes effect when it is read back from the own log. An append that fails, times out or loses the race is
therefore no special case: the keeper reads on, folds the stored record, and decides again.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

from actors.runtime.actor import ActorDown, ActorFault, Context
from actors.runtime.snapshots import Snapshots
from asyncrl.bus.acks import MESSAGE_ID
from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.errors import WrongSequence
from asyncrl.bus.fold import Fold, Input
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import Record, last_sequence, read_message, read_newest
from asyncrl.bus.publish import BY, EXPECT_LAST, EXPECT_MESSAGE, TIME_TO_LIVE, publish
from asyncrl.bus.publish import WRITER as NONCE
from asyncrl.crash import crash_point
from topics.actors import Activity, KeeperClaimed, KeeperHeartbeat, KeeperSnapshot
from topics.roles import OWN
from topics.topic import Retention, Stream, Topic
from topics.wire import Headers, Message, prepare

HEARTBEAT_S = 3.0
_OWN_RECORDS: dict[type[Message], str] = {
    KeeperClaimed: "claimed",
    KeeperHeartbeat: "heartbeat",
    KeeperSnapshot: "snapshot",
}


def _is_log(stream: Stream) -> bool:
    return stream.keep is Retention.LEDGER


class Keeper:
    """Reads the ledger logs that a fold has methods for, and writes its own. Payload streams are trimmed: no log."""

    def __init__(self, context: Context, own: Stream, fold: Fold) -> None:
        """
        Raises:
            ActorFault: the fold of a user's keeper reads a stream that is no log; asyncrl's own folds have another way
            to read those.
        """
        inputs = fold.inputs(context.bus.tables)
        unread = [topic.name for stream, one in inputs.items() if not _is_log(stream) for topic in one.topics]
        if unread and context.role not in OWN:
            words = f"the fold of {context.role} reads {', '.join(unread)}, which is purged once nothing needs it"
            raise ActorFault(f"{words}; expected topics that are kept for the whole run: purged topics are for workers")
        self.context = context
        self.own = own
        self.nonce = secrets.token_hex(8)
        self._fold = fold
        self._snapshots = Snapshots(context, own, fold)
        self._tail = 0  # sequence up to which the own log is folded or this writer's
        self._foreign = 0  # sequence of the newest record on the own log that another process appended
        self._claimed = False
        self._rival_at = -math.inf  # when the own log last grew by a record of another process of this role
        self._clock = time.time() - time.monotonic()  # the server's clock ahead of this process's monotonic one
        self._deposed = False  # another process claimed the log; stop writing
        self._appending = asyncio.Lock()
        self._news = asyncio.Event()  # something was folded since `changes` last returned
        self._readers_back: list[tuple[int, asyncio.Future[None]]] = []
        inputs = {own: Input([], headers_only=False)} | inputs
        for topic in [topic for entry in inputs.values() for topic in entry.topics]:
            prepare(topic.message)
        ledgers = {stream: entry for stream, entry in inputs.items() if _is_log(stream)}
        self._listeners = {stream: self._listener(stream, entry) for stream, entry in ledgers.items()}
        self._own_log = self._listeners[own]

    async def start(self, make_ready: Callable[[], Awaitable[object]] | None = None) -> None:
        """Fold all logs, then claim the own log once no other process of this role writes it.

        Args:
            make_ready: work to be done before this process can write; no other process does it at the same time.

        Raises:
            ActorDown: another process wrote the log while this one made ready.
        """
        self.context.tasks.start(self._watch_stop_requests())
        folded = await self._snapshots.restore(list(self._listeners))
        for stream, listener in self._listeners.items():
            await listener.start(folded.get(stream.name, 0))
        for listener in self._listeners.values():
            await listener.caught_up()
        await self._be_next()
        if self.context.stop.is_set():
            return
        self.context.tasks.start(self._send_heartbeats())
        if make_ready is not None:
            await make_ready()
        crash_point("keeper.claiming")
        await self._claim()
        crash_point("keeper.claimed")
        self.context.doing(Activity())

    async def run(
        self, decide: Callable[[], Sequence[Message]], *, until: Callable[[], float | None] = lambda: None
    ) -> None:
        """Append the decisions after each newly folded record, until the actor is asked to stop.

        Args:
            until: moment of the server's clock, in seconds, at which to decide even without anything new.
        """
        while not self.context.stop.is_set():
            if decisions := decide():
                await self.append(decisions)
            else:
                await self.changes(until())
        await self.close()

    async def close(self) -> None:
        """Stop reading."""
        for listener in self._listeners.values():
            await listener.close()

    async def append(self, decisions: Sequence[Message]) -> bool:
        """Append decisions in order, all or a prefix of them; True when all were appended.

        Call it without an await after deciding: a record that another process appends from then on refuses this append.
        Returns once these records, or those that came before them, have been read back and folded.
        """
        return await self._append(decisions) == len(decisions)

    async def append_until_stored(self, facts: Sequence[Message]) -> None:
        """Append unconditionally: retry until all records are there, or another process took over."""
        left = list(facts)
        while left and not self._deposed:
            left = left[await self._append(left) :]

    def now(self) -> float:
        """The server's clock, seconds since the epoch; the clock of this machine has no influence."""
        return time.monotonic() + self._clock

    async def _be_next(self) -> None:
        """Wait on standby while another process of this role writes the own log; returns once this one may make ready.

        Of the standby processes one is first: the heartbeats of the others are refused, and they stay on standby.
        """
        bus, links = self.context.bus, self.context.bus.reconnects
        while not self.context.stop.is_set():
            if (left_s := self._rival_lease_s()) > 0:
                self.context.doing(Activity("standby"))
                await self.changes(until=self.now() + left_s)
                if bus.reconnects != links or not bus.client.is_connected:  # it could not be read
                    links, self._rival_at = bus.reconnects, time.monotonic()
            elif await self.append([KeeperHeartbeat(self.nonce)]):
                self.context.doing(Activity("taking over"))
                return

    def _rival_lease_s(self) -> float:
        """Seconds for which the own log is still another process's; an earlier start of this one has ended."""
        return self._rival_at + self.context.config.supervision.silence_s - time.monotonic()

    async def _append(self, decisions: Sequence[Message]) -> int:
        """Append a prefix of the decisions; returns its length."""
        foreign = self._foreign
        async with self._appending:
            if self._deposed or self._foreign != foreign:
                return 0
            base = max(self._tail, self._own_log.last)
            names = [self._name(decision, base + number) for number, decision in enumerate(decisions)]
            appends = map(self._append_one, decisions, count(base), names, ["", *names])
            results = await asyncio.gather(*appends, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException) and not isinstance(result, WrongSequence):
                    raise result
            stored = sum(isinstance(result, int) for result in results)
            if stored < len(decisions):
                stored = await self._count_stored(names, base)
                await self._catch_up()
            self._tail = max(self._tail, base + stored)
        crash_point("keeper.appended")
        await self._read_back(base + stored)
        return stored

    async def _count_stored(self, names: list[str], base: int) -> int:
        """Return how many are on the log: one without acknowledgement is there although its repeat was refused."""
        for number, name in enumerate(names):
            record = await read_message(self.context.bus, self.own, base + number + 1, stored=False)
            if record is None or record.headers.get(MESSAGE_ID) != name:
                return number
        return len(names)

    async def changes(self, until: float | None = None) -> None:
        """Wait until something new is folded, the actor shall stop, or the server's clock passes `until` (seconds)."""
        try:
            async with asyncio.timeout(None if until is None else max(0.0, until - self.now())):
                await self._news.wait()
        except TimeoutError:
            pass  # the moment has come
        if self.context.stop.is_set():
            return  # and it stays news
        self._news.clear()

    def wake(self) -> None:
        """Let `changes` return: something new has come from elsewhere than the logs."""
        self._news.set()

    async def _watch_stop_requests(self) -> None:
        await self.context.stop.wait()
        self._news.set()

    def _listener(self, stream: Stream, entry: Input) -> Listener:
        bus, snapshots = self.context.bus, self._snapshots.subject
        subjects = [topic.pattern(bus.run) for topic in entry.topics if stream is not self.own]  # of that everything
        take, refuse, headers_only = self._take, self._refuse, entry.headers_only
        return Listener(
            bus,
            stream,
            take,
            refuse,
            subjects=subjects,
            headers_only=headers_only,
            unread=lambda record: record.subject == snapshots,  # only a start reads them
        )

    def _take(self, topic: Topic[Message], message: Message | Headers, record: Record) -> None:
        self._check_claim(topic, record)
        if topic.message not in _OWN_RECORDS:
            self._fold.apply(topic, message, record)
        self._passed(record)

    def _refuse(self, record: Record, error: Exception) -> None:
        self.context.refuse(record, error)
        # A body that is lost is a fault of storage. All else would be decided again, and stored again, without an end.
        if record.stream is self.own and record.headers.get(NONCE) == self.nonce and not isinstance(error, BlobMissing):
            words = f"message {record.sequence} of log {self.own.name}, which this process has just stored"
            reason = f"{type(error).__name__}: {error}"
            self.context.fail(ActorFault(f"{words}, cannot be read back: {reason}; report it with its dead letter"))
        self._passed(record)

    def _passed(self, record: Record) -> None:
        """Note that a record was folded or rejected."""
        self._snapshots.count(record)
        if record.stream is self.own and record.headers.get(NONCE) != self.nonce:
            self._foreign = record.sequence
            writer = record.headers.get(BY, "")
            if writer.startswith(f"{self.context.role}-") and writer != self.context.actor_id:
                self._rival_at = time.monotonic()
        elif record.stream is self.own:
            self._clock = record.time_ns / 1e9 - time.monotonic()
        self._news.set()
        if record.stream is self.own and self._readers_back:
            for entry in [entry for entry in self._readers_back if entry[0] <= record.sequence]:
                self._readers_back.remove(entry)
                if not entry[1].done():
                    entry[1].set_result(None)
        if self._claimed and self._snapshots.due and not any(listener.waits for listener in self._listeners.values()):
            positions = {stream.name: listener.last for stream, listener in self._listeners.items()}
            self.context.tasks.start(self._publish_snapshot(self._snapshots.take(positions)))

    def _check_claim(self, topic: Topic[Message], record: Record) -> None:
        if topic.message is not KeeperClaimed or record.stream is not self.own:
            return
        if record.headers[NONCE] == self.nonce:
            self._claimed = True
        elif self._claimed:
            self._deposed = True
            self.context.fail(ActorDown(f"another {self.context.role} took over this log; leaving it to that one"))

    async def _append_one(self, decision: Message, expected: int, name: str, before: str) -> int:
        headers = {EXPECT_LAST: str(expected), NONCE: self.nonce, MESSAGE_ID: name}
        if before:
            # Another process's record in the place of the one before would satisfy the sequence alone.
            headers[EXPECT_MESSAGE] = before
        if isinstance(decision, KeeperHeartbeat):
            headers[TIME_TO_LIVE] = "60s"
        return await publish(self.context.bus, decision, topic=self._topic_for(decision), headers=headers)

    def _topic_for(self, decision: Message) -> Topic[Message]:
        """The topic of a decision; the records that each keeper's log has are found by the role."""
        kind, tables = _OWN_RECORDS.get(type(decision)), self.context.bus.tables
        return tables.by_name[f"{self.context.role}.{kind}"] if kind else tables.topic_for(decision)

    def _name(self, decision: Message, expected: int) -> str:
        return f"{self._topic_for(decision).id_of(decision)}:{self.nonce}:{expected}"

    async def _catch_up(self) -> None:
        """Fold all that is on the own log now, and learn the sequence of its end."""
        last = await last_sequence(self.context.bus, self.own)
        # The newest records may be heartbeats that have expired: the end itself is never read back.
        newest = await read_newest(self.context.bus, self.own)
        sequence = newest.sequence if newest is not None else 0
        await self._read_back(sequence)
        if self._own_log.last >= sequence:
            self._tail = max(self._tail, last)

    async def _read_back(self, sequence: int) -> None:
        if self._own_log.last >= sequence or self.context.stop.is_set():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._readers_back.append((sequence, future))
        limit_s = self.context.bus.publish_deadline_s
        try:
            async with asyncio.timeout(limit_s):
                await future
        except TimeoutError:
            words = f"message {sequence} of log {self.own.name} was not read back within {limit_s:.0f} s"
            raise ActorDown(words) from None

    async def _claim(self) -> None:
        """Claim the own log.

        Raises:
            ActorDown: another process of this role writes it.
        """
        message = KeeperClaimed(self.context.role, self.context.actor_id, self.nonce)
        while not (self._claimed or self.context.stop.is_set()):
            await self._catch_up()
            if self._rival_lease_s() > 0:
                raise ActorDown(f"another {self.context.role} writes this log; leaving it to that one")
            await self.append([message])

    async def _publish_snapshot(self, snapshot: KeeperSnapshot) -> None:
        """Put a snapshot on the log; one that comes second is left out, another follows."""
        crash_point("snapshot.taken")
        await self.append([snapshot])
        crash_point("snapshot.published")

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(min(HEARTBEAT_S, self.context.config.supervision.silence_s / 3))
            await self.append([KeeperHeartbeat(self.nonce)])
