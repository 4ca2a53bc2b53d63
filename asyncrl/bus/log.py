"""Reading a log: every message of a stream in order, from any sequence on, for as long as one listens."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

import msgspec
import nats.errors
from nats.aio.msg import Msg

from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError, BusGone, BusRefused, BusUnreachable, Disconnected
from asyncrl.bus.pull import Position, Puller, position
from topics.topic import Retention, Stream, Topic

T = TypeVar("T")

_NO_MESSAGE = 10037
_WINDOW = 1024  # messages asked for ahead
_POLL_S = 1.0  # between looks for the end of a log that is being read
_SETTLED_S = 5.0  # a new leader of a cluster has applied what its log holds
_FORGET_S = 60.0  # the server forgets a reader that is silent for this long


class Record(NamedTuple):
    """One message of a log."""

    stream: Stream
    sequence: int
    subject: str
    headers: dict[str, str]
    data: bytes  # empty where only headers were asked for
    time_ns: int  # server's clock when it was stored

    @property
    def key(self) -> str:
        """The last part of its subject, of a topic with a key the key."""
        return self.subject.rsplit(".", 1)[1]


class LogReader:
    """Hands every message of a stream to `on_record`, in order and without gaps.

    It reads through its own consumer and makes a new one, from the last message seen, when the server forgot it, the
    connection broke or a message is missing. A log that keeps the newest message of each subject is in the server's
    memory and starts empty with the server: the newest of each are then read again, and handed on if they are new.
    `caught_up` is set once everything that was there at the start has been read.
    """

    def __init__(
        self,
        bus: Bus,
        stream: Stream,
        on_record: Callable[[Record], None],
        *,
        after: int = 0,
        subjects: Sequence[str] = (),
        headers_only: bool = False,
        newest: bool = False,
        paced: int = 0,
    ) -> None:
        self._bus = bus
        self.stream = stream
        self._on_record = on_record
        self._subjects = list(subjects)
        self._headers_only = headers_only
        self._newest = newest  # begin with the newest message of each subject
        self._paced = paced  # hand on this many messages, and then no more than `more` allows; 0 for all as they arrive
        self.last = after  # sequence of the newest message handed on
        self.caught_up = asyncio.Event()
        self._news = asyncio.Event()  # a message was handed on, or the end was found
        self._puller: Puller | None = None
        self._consumer = ""
        self._expected = 1
        self._restart: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._closed = False
        # Of a log in memory: server's clock at the newest message of each subject. Equal ones are the same message;
        # which one is later does not count, for the clock may be set back.
        self._seen: dict[str, int] = {}

    async def start(self) -> None:
        """Begin to read.

        Raises:
            BusError: the stream is not there, or may not be read.
        """
        self._consumer, answer = await retry_until_deadline(self._bus, self._create)
        self._expected = 1
        if not answer.get("num_pending"):
            self._end()
        elif self._looking is None:
            self._looking = asyncio.create_task(self._look_for_the_end())
        self._puller = Puller(self._bus, self._consumer, self._receive, on_lost=self._lost, on_beat=self._beat)
        await self._puller.start(self._paced or _WINDOW)
        if self._reconnected not in self._bus.on_reconnect:
            self._bus.on_reconnect.append(self._reconnected)

    async def _create(self) -> tuple[str, dict[str, Any]]:
        """Make a consumer of a new name each time: one that a cluster placed on a dead server never answers again."""
        name = f"r{secrets.token_hex(6)}"
        stream = self.stream.full_name(self._bus.run)
        config: dict[str, Any] = {
            "name": name,
            "ack_policy": "none",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(_FORGET_S * 1e9),
            "headers_only": self._headers_only,
        }
        if self._seen or (self._newest and not self.last):
            config["deliver_policy"] = "last_per_subject"
            config["filter_subjects"] = [f"asyncrl.{self._bus.run}.>"]
        else:
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": self.last + 1}
        if self._subjects:
            config["filter_subjects"] = self._subjects
        body = {"stream_name": stream, "config": config, "action": "create"}
        return f"{stream}.{name}", await self._bus.api(f"CONSUMER.CREATE.{stream}.{name}", body)

    async def close(self) -> None:
        """Stop reading."""
        self._closed = True
        if self._reconnected in self._bus.on_reconnect:
            self._bus.on_reconnect.remove(self._reconnected)
        for task in (self._restart, self._looking):
            if task is not None:
                task.cancel()
        if self._puller is not None:
            await self._puller.close()
        if self._consumer and self._bus.client.is_connected:  # else the server forgets it by itself
            await self._bus.send(self._bus.layout.call(f"CONSUMER.DELETE.{self._consumer}"))

    def _receive(self, message: Msg) -> None:
        if self._restart is not None or self._closed:
            return
        at = position(message.reply)
        if at.consumer_sequence != self._expected:
            self._lost(f"message {self._expected} is missing")
            return
        self._expected += 1
        if at.time_ns != self._seen.get(message.subject):
            self._hand_on(message, at)
        if at.pending == 0:
            self._end()
        if not self._paced:
            self.more(1)

    def _hand_on(self, message: Msg, at: Position) -> None:
        self.last = at.stream_sequence
        if self.stream.keep is Retention.LAST:
            self._seen[message.subject] = at.time_ns
        headers = message.headers or {}
        self._on_record(Record(self.stream, self.last, message.subject, headers, message.data, at.time_ns))
        self._news.set()

    def more(self, count: int) -> None:
        """Hand on that many more messages."""
        self._news.set()  # the server is silent from here on, until they come
        if self._puller is not None:
            self._puller.grant(count)

    async def wait(self, enough: Callable[[], bool], silent_s: float) -> None:
        """Wait until it has handed on enough, or all that was there at the start.

        Raises:
            BusGone: the server has sent nothing for this many seconds.
            BusError: the connection ended permanently, for example because the login was revoked.
        """
        since_s = time.monotonic()
        while not (self.caught_up.is_set() or enough()):
            self._news.clear()
            try:
                async with asyncio.timeout(min(_POLL_S, silent_s)):  # the end of a connection is no news of a log
                    await self._news.wait()
                since_s = time.monotonic()
            except TimeoutError:
                if self._bus.ended_by is not None:
                    raise self._bus.ended_by from None
                if self._restart is None and self._puller is not None and not self._puller.owed:
                    since_s = time.monotonic()  # what came is not worked off, and no more was asked for
                if time.monotonic() - since_s >= silent_s:
                    found = f"nothing of {self.stream.name} behind message {self.last}"
                    raise BusGone(f"run {self._bus.run}: the server sent {found} for {silent_s:.0f} s") from None

    def _end(self) -> None:
        self.caught_up.set()
        self._news.set()

    async def _look_for_the_end(self) -> None:
        """Detect the end of a log whose last messages expire or are trimmed before they arrive."""
        while not self.caught_up.is_set():
            await asyncio.sleep(_POLL_S)
            with contextlib.suppress(BusError):  # asked again
                newest = [await read_newest(self._bus, self.stream, subject) for subject in self._subjects]
                newest = newest or [await read_newest(self._bus, self.stream)]
                if self.last >= max((record.sequence for record in newest if record is not None), default=0):
                    self._end()

    def _reconnected(self) -> None:
        """Make a new consumer: only a later message would show that messages were lost in the broken connection."""
        self._lost("the connection broke")

    def _beat(self, sent: int) -> None:
        """Make a new consumer if the last messages were lost, for example between servers: no message follows them."""
        if sent >= self._expected:
            self._lost(f"message {self._expected} is missing")

    def _lost(self, _reason: str) -> None:
        if self._restart is None and not self._closed:
            self._restart = self._bus.readers.start(self._start_again())

    async def _start_again(self) -> None:
        pause = 0.05
        assert self._puller is not None
        await self._puller.close()
        while self._bus.ended_by is None:
            try:
                await self.start()
                break
            except (BusError, TimeoutError):
                await asyncio.sleep(pause)  # the server is away: no event announces its return
                pause = min(1.0, pause * 2)
        self._restart = None


async def read_message(bus: Bus, stream: Stream, sequence: int, *, stored: bool = True) -> Record | None:
    """Read one message by its sequence; None when it is not there any more.

    Args:
        stored: the log was given this message, so that a cluster's leader that lacks it may not have applied it yet.

    Raises:
        BusGone: no answer within the deadline of publishes.
    """
    get = _get_stored if stored else _get
    return await retry_until_deadline(bus, lambda: get(bus, stream, {"seq": sequence}))


async def read_next(bus: Bus, stream: Stream, subject: str, sequence: int) -> Record | None:
    """The first message of a subject at or above a sequence; None without one."""
    return await retry_until_deadline(bus, lambda: _get(bus, stream, {"seq": sequence, "next_by_subj": subject}))


async def read_last(bus: Bus, topic: Topic[Any], key: str | None = None, *, stored: bool = False) -> Record | None:
    """The newest message of a topic, of one key or of all keys; None without one.

    Args:
        stored: the log was given one, as in `read_message`.
    """
    subjects = [topic.pattern(bus.run)] if key is None else bus.tables.subjects(topic, bus.run, key)
    found = [await read_newest(bus, topic.stream, subject, stored=stored) for subject in subjects]
    return max((record for record in found if record is not None), key=lambda record: record.sequence, default=None)


async def read_newest(bus: Bus, stream: Stream, subject: str = "", *, stored: bool = False) -> Record | None:
    """The newest message of a log that is still there, or of those that a subject or pattern matches; None for none.

    For `>` the server looks only at the log's last sequence, and finds nothing if that message has expired or was
    purged.
    """
    get = _get_stored if stored else _get
    body = {"last_by_subj": subject or f"asyncrl.{bus.run}.>"}
    return await retry_until_deadline(bus, lambda: get(bus, stream, body))


async def last_sequence(bus: Bus, stream: Stream) -> int:
    """Sequence of the last message that a log was given, even if it was purged; 0 for none."""
    return int((await stream_info(bus, stream))["state"]["last_seq"])


async def first_since(bus: Bus, stream: Stream, time_ns: int) -> int:
    """Sequence of the first message stored at or after a time; one past the last without such a message."""
    state = (await stream_info(bus, stream))["state"]
    low, high = max(1, int(state["first_seq"])), int(state["last_seq"]) + 1
    while low < high:
        middle = (low + high) // 2
        found = await read_next(bus, stream, f"asyncrl.{bus.run}.>", middle)
        if found is None or found.time_ns >= time_ns:
            high = middle
        else:
            low = found.sequence + 1
    return low


async def stream_info(bus: Bus, stream: Stream, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The server's description of a stream: its `config` and `state`, plus the parts that `body` requests."""
    return await retry_until_deadline(bus, lambda: bus.api(f"STREAM.INFO.{stream.full_name(bus.run)}", body))


async def read_last_of_each(bus: Bus, stream: Stream, subjects: Sequence[str]) -> list[Record]:
    """The newest message of each subject that has one, in one request; wildcards count each subject they match."""
    return await retry_until_deadline(bus, lambda: _last_of_each(bus, stream, subjects))


async def _last_of_each(bus: Bus, stream: Stream, subjects: Sequence[str]) -> list[Record]:
    records: list[Record] = []

    def receive(message: Msg) -> bool:
        headers = message.headers or {}
        status = headers.get("Status", "")
        if not status:
            records.append(_record(stream, message))
        elif status == "503":
            raise Disconnected
        elif status not in ("204", "404"):
            raise BusRefused("DIRECT.GET", int(status), headers.get("Description", ""))
        return bool(status)

    body = msgspec.json.encode({"multi_last": list(subjects)})
    await bus.request(bus.layout.call(f"DIRECT.GET.{stream.full_name(bus.run)}"), body, is_last=receive)
    return records


async def _get(bus: Bus, stream: Stream, body: dict[str, Any]) -> Record | None:
    if bus.clustered:
        return await _get_from_leader(bus, stream, body)
    subject = bus.layout.call(f"DIRECT.GET.{stream.full_name(bus.run)}")
    message = await bus.request(subject, msgspec.json.encode(body))
    headers = message.headers or {}
    if "Status" in headers and "Nats-Sequence" not in headers:
        if headers["Status"] == "404":
            return None
        if headers["Status"] == "503":
            raise Disconnected  # a server that starts does not have its streams yet
        raise BusRefused(subject, int(headers["Status"]), headers.get("Description", "no description"))
    return _record(stream, message)


async def _get_stored(bus: Bus, stream: Stream, body: dict[str, Any]) -> Record | None:
    """Read what a log was given.

    A cluster's new leader answers before it has applied everything that its predecessor acknowledged: the request is
    repeated until it has led for `_SETTLED_S` and its log has caught up.

    Raises:
        Disconnected: the leader may not have applied it yet.
    """
    record = await _get(bus, stream, body)
    if record is not None or not bus.clustered:
        return record
    info = await bus.api(f"STREAM.INFO.{stream.full_name(bus.run)}")
    since = info["cluster"].get("leader_since", "")  # "" of a server before 2.12
    led_s = (server_time_ns(info["ts"]) - server_time_ns(since)) / 1e9
    last = info["state"]["last_seq"]
    if led_s < _SETTLED_S or last < body.get("seq", 0):
        raise Disconnected(f"the leader of {stream.name} has led for {led_s:.1f} s, and has {last} messages")
    return await _get(bus, stream, body)  # it may have come between the two answers


async def _get_from_leader(bus: Bus, stream: Stream, body: dict[str, Any]) -> Record | None:
    """Read from the leader: any copy answers a direct get, and a lagging copy misses new messages."""
    try:
        answer = await bus.api(f"STREAM.MSG.GET.{stream.full_name(bus.run)}", body)
    except BusRefused as error:
        if error.code == _NO_MESSAGE:
            return None
        raise
    found = answer["message"]
    headers = bus.client._parse_header_lines(base64.b64decode(found.get("hdrs", "")))
    data = base64.b64decode(found.get("data", ""))
    return Record(stream, found["seq"], found["subject"], headers, data, server_time_ns(found["time"]))


async def retry_until_deadline(bus: Bus, ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again while the server is away.

    Raises:
        BusGone: no answer within the deadline of publishes.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + bus.publish_deadline_s
    while True:
        try:
            return await ask()
        except (TimeoutError, Disconnected, BusUnreachable) as error:
            if loop.time() > deadline:
                raise BusGone(f"no answer within {bus.publish_deadline_s:.0f} s: {error}") from error
        except (nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError) as error:
            raise bus.ended_by or BusGone("a read: the connection is closed") from error
        await asyncio.sleep(0.1)  # no event announces the server's return


def _record(stream: Stream, message: Msg) -> Record:
    headers = message.headers or {}
    time_ns = server_time_ns(headers.get("Nats-Time-Stamp", ""))
    return Record(stream, int(headers["Nats-Sequence"]), headers["Nats-Subject"], headers, message.data, time_ns)


def server_time_ns(text: str) -> int:
    """Nanoseconds since the epoch of a time as the server writes it (RFC 3339, to the microsecond); 0 for none."""
    return int(datetime.fromisoformat(text).timestamp() * 1e6) * 1000 if text and text[0] != "0" else 0
