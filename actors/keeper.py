"""The loop of all keepers: fold the inputs and the own log, decide, append with compare-and-set, read back.

A decision takes effect when it is read back from the own log. An append that fails, times out or comes second is
therefore no special case: the keeper reads on, folds whoever's record is there, and decides anew.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from actors.actor import ActorDown, Context
from asyncrl.bus.errors import WrongSequence
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.talk import BLOB, EXPECT_LAST, TIME_TO_LIVE, BlobMissing, body_of, say
from topics.actors import KeeperBeat, KeeperClaimed
from topics.table import BY_NAME, topic_of
from topics.topic import Stream, Topic
from topics.wire import Message, WireError, decode

BEAT_S = 3.0
NONCE = "writer"  # header that says which writer appended a record


class Decision(NamedTuple):
    """Something a keeper wants to say."""

    topic: Topic[Any]
    message: Message
    key: str = ""
    id: str = ""


class Input(NamedTuple):
    """A log that a keeper folds besides its own."""

    stream: Stream
    topics: Sequence[Topic[Any]]
    headers_only: bool = False


class Fold(Protocol):
    """State as a pure function of messages."""

    def apply(self, topic: Topic[Any], message: Any, record: Record) -> None:
        """Fold one message in; `message` is None where only headers are read."""


class _Line:
    """Records of one log on their way into the fold; they wait behind one whose body is being fetched."""

    def __init__(self, headers_only: bool) -> None:
        self.headers_only = headers_only
        self.waiting: deque[Record] = deque()
        self.fetching = False
        self.folded = 0  # sequence of the newest record folded


class Keeper:
    """Reads the logs into a fold and writes the own log."""

    def __init__(
        self, context: Context, own: Stream, inputs: Sequence[Input], fold: Fold, *, own_headers_only: bool = False
    ) -> None:
        self.context = context
        self.own = own
        self.nonce = secrets.token_hex(8)
        self._fold = fold
        self._tail = 0  # last sequence of the own log, as far as known
        self._claimed = False
        self._appending = asyncio.Lock()
        self._news = asyncio.Event()  # something was folded since `changes` last returned
        self._readers_back: list[tuple[int, asyncio.Future[None]]] = []
        self._lines = {entry.stream.name: _Line(entry.headers_only) for entry in inputs}
        self._lines[own.name] = _Line(own_headers_only)
        run = context.bus.run
        self._readers = [LogReader(context.bus, own, self._take, headers_only=own_headers_only)]
        for entry in inputs:
            subjects = [topic.pattern(run) for topic in entry.topics]
            self._readers.append(
                LogReader(context.bus, entry.stream, self._take, subjects=subjects, headers_only=entry.headers_only)
            )

    async def start(self) -> None:
        """Fold everything that was ever said, then claim the own log."""
        for reader in self._readers:
            await reader.start()
        for reader in self._readers:
            async with asyncio.timeout(120):
                await reader.caught_up.wait()
        while any(line.fetching for line in self._lines.values()):
            await self.changes()
        await self._claim()
        self.context.watch(asyncio.create_task(self._beat()))

    async def close(self) -> None:
        """Stop reading."""
        for reader in self._readers:
            await reader.close()

    async def append(self, decisions: Sequence[Decision]) -> bool:
        """Append decisions in order, all or a prefix of them; True when all were appended.

        Returns once what was appended has been read back and folded.
        """
        async with self._appending:
            base = max(self._tail, self._readers[0].last)
            results = await asyncio.gather(
                *(self._append_one(decision, base + number) for number, decision in enumerate(decisions)),
                return_exceptions=True,
            )
            lost = False
            for result in results:
                if isinstance(result, WrongSequence):
                    lost = True
                elif isinstance(result, BaseException):
                    raise result
                else:
                    self._tail = max(self._tail, result)
            newest = self._tail
            if lost:
                self._tail = await self._find_tail()
        await self._read_back(newest)
        return not lost

    async def changes(self, until: float | None = None) -> None:
        """Wait until something new is folded, the actor shall stop, or the clock passes `until` (seconds)."""
        waits = [asyncio.ensure_future(self._news.wait()), asyncio.ensure_future(self.context.stop.wait())]
        timeout = None if until is None else max(0.0, until - time.time())
        try:
            await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._news.clear()

    def _take(self, record: Record) -> None:
        line = self._lines[record.stream.name]
        if line.fetching or (BLOB in record.headers and not line.headers_only):
            line.waiting.append(record)
            if not line.fetching:
                line.fetching = True
                self.context.watch(asyncio.create_task(self._fetch(line)))
            return
        self._fold_in(line, record, record.data)

    async def _fetch(self, line: _Line) -> None:
        while line.waiting:
            record = line.waiting[0]
            try:
                self._fold_in(line, record, await body_of(self.context.bus, record))
            except (WireError, BlobMissing) as error:
                await self.context.bury(record, str(error))
            line.waiting.popleft()
        line.fetching = False
        self._news.set()

    def _fold_in(self, line: _Line, record: Record, body: bytes) -> None:
        topic = topic_of(record.subject)
        message: Any = None
        try:
            if topic is None or topic.stream is not record.stream:
                raise WireError("its subject is in no row of the topic table")
            if not line.headers_only:
                message = decode(topic.message, body)
            self._check_claim(topic, message, record)
            if topic.message is not KeeperBeat:
                self._fold.apply(topic, message, record)
        except (WireError, KeyError, ValueError) as error:  # the latter two: headers that are not what they must be
            self.context.watch(asyncio.create_task(self.context.bury(record, str(error))))
        line.folded = record.sequence
        self._news.set()
        if record.stream is self.own and self._readers_back:
            for entry in [entry for entry in self._readers_back if entry[0] <= record.sequence]:
                self._readers_back.remove(entry)
                if not entry[1].done():
                    entry[1].set_result(None)

    def _check_claim(self, topic: Topic[Any], message: Any, record: Record) -> None:
        if topic.message is not KeeperClaimed or record.stream is not self.own or not self._claimed:
            return
        if record.headers.get(NONCE) != self.nonce:
            self.context.fail(ActorDown(f"another {self.context.role} took over this log; leaving it to that one"))

    async def _append_one(self, decision: Decision, expected: int) -> int:
        headers = {EXPECT_LAST: str(expected), NONCE: self.nonce}
        if decision.topic.message is KeeperBeat:
            headers[TIME_TO_LIVE] = "60s"
        return await say(
            self.context.bus,
            decision.topic,
            decision.message,
            key=decision.key,
            id=f"{decision.id}:{self.nonce}:{expected}",
            headers=headers,
        )

    async def _find_tail(self) -> int:
        info = await self.context.bus.api(f"STREAM.INFO.{self.own.full_name(self.context.bus.run)}")
        return int(info["state"]["last_seq"])

    async def _read_back(self, sequence: int) -> None:
        if self._lines[self.own.name].folded >= sequence or self.context.stop.is_set():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._readers_back.append((sequence, future))
        async with asyncio.timeout(30):
            await future

    async def _claim(self) -> None:
        claimed = BY_NAME[f"{self.context.role}.claimed"]
        message = KeeperClaimed(self.context.role, self.context.actor_id, self.nonce)
        while not self._claimed:
            self._tail = await self._find_tail()
            self._claimed = await self.append([Decision(claimed, message)])

    async def _beat(self) -> None:
        beat = Decision(BY_NAME[f"{self.context.role}.beat"], KeeperBeat(self.nonce))
        while True:
            await asyncio.sleep(BEAT_S)
            await self.append([beat])
