"""Publish and read typed messages: ids, fences, compare-and-set, and blobs for large bodies."""

from __future__ import annotations

import re
import time
from typing import Any, TypeVar

import msgspec
import xxhash

from asyncrl.bus.acks import MESSAGE_ID
from asyncrl.bus.blobs import BLOB, BlobMissing, chunk_bytes, fetch_blob, in_chunks, store_blob
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError, WrongSequence
from asyncrl.bus.log import Record, read_message, read_newest
from asyncrl.bus.sealing import open_body, seal_body
from topics.ids import TRAJECTORY_ID, trajectory_name
from topics.payload_refs import ROUTING
from topics.roles import OWN
from topics.table import BUILT_IN, Tables
from topics.topic import BLOBS, TRAJECTORIES, Topic
from topics.trajectories import TRAJECTORY_GENERATED, Reference, TrajectoryGenerated
from topics.wire import ID_PATTERN, SEALED, Headers, Message, WireError, decode, encode, headers_of

M = TypeVar("M", bound=Message)

_ID = re.compile(ID_PATTERN)
EXPECT_LAST = "Nats-Expected-Last-Sequence"
EXPECT_MESSAGE = "Nats-Expected-Last-Msg-Id"
EXPECT_SUBJECT = "Nats-Expected-Last-Subject-Sequence"
EXPECT_FILTER = "Nats-Expected-Last-Subject-Sequence-Subject"
TIME_TO_LIVE = "Nats-TTL"
WRITER = "writer"  # header with the writer that appended a record to a keeper's log
BY = "by"  # header with the publisher: "rollout-2"
_ADDED = ("prompt-tokens",)  # headers that messages of older versions lack


class Fenced(BusError):
    """Another worker took this trajectory over."""


class TwoContents(BusError):
    """Two different contents were published under one message id."""


class Unpublishable(WireError):
    """A message that no reader could read, and so is not stored."""


class Prepared(msgspec.Struct):
    """A message ready to be stored: encrypted, with its headers. It may wait, and be published again."""

    topic: str
    key: str
    body: bytes
    headers: dict[str, str]
    pool: str = ""  # in its subject


def pack(message: Message, topic: Topic[Any]) -> bytes:
    """The body of a message.

    Raises:
        WireError: it cannot be encoded.
    """
    try:
        if topic.json:
            message.v = message.V
            return msgspec.json.encode(message)
        return encode(message)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise WireError(f"its {type(message).__name__} cannot be encoded: {error}") from error


async def publish(
    bus: Bus, message: Message, *, topic: Topic[Message] | None = None, headers: dict[str, str] | None = None
) -> int:
    """Publish a message durably and return its sequence.

    Args:
        topic: of a type of message that several topics share; else it follows from the type.
        headers: further headers (expectations, time to live, or a message id that is used unchanged).

    Raises:
        SecretGone: it is to be sealed under a data key that is not there.
        Unpublishable: it cannot be encoded, or its key is no part of a subject, or a field of an operator's request, or
            of a message of a user's actor, is not what its type says.
    """
    return await publish_prepared(bus, await prepare(bus, message, topic=topic, headers=headers))


async def prepare(
    bus: Bus, message: Message, *, topic: Topic[Message] | None = None, headers: dict[str, str] | None = None
) -> Prepared:
    """Seal a message for `publish_prepared`; arguments and errors as of `publish`."""
    topic = topic or bus.tables.topic_for(message)
    body = await _body(bus, topic, message)
    headers = _headers(topic, message, body) | (headers or {})
    return Prepared(topic.name, topic.key_of(message), body, headers, _pool(bus, topic, message))


async def publish_prepared(bus: Bus, prepared: Prepared) -> int:
    """Publish a prepared message durably, prepared here or in an earlier process, and return its sequence."""
    topic = bus.tables.by_name[prepared.topic]
    subject = topic.subject(bus.run, prepared.key, prepared.pool)
    return await _store(bus, topic, subject, prepared.body, dict(prepared.headers))


async def send(bus: Bus, message: Message, lasts_s: int = 0) -> None:
    """Publish a message that another one follows soon: without an acknowledgement, and not while the server is away.

    Args:
        lasts_s: seconds for which the server keeps it; 0: for as long as its stream keeps messages.
    """
    topic = bus.tables.topic_for(message)
    if bus.client.is_connected:
        body = await _sealed(bus, topic, message)
        headers = headers_of(message) | ({BY: bus.name} if bus.name else {})
        headers |= {TIME_TO_LIVE: f"{lasts_s}s"} if lasts_s else {}
        await bus.send(topic.ingest(bus.run, topic.key_of(message)), body, headers or None)


async def publish_if_latest(
    bus: Bus, message: Message, expected: int, *, fence: str = "", headers: dict[str, str] | None = None, task: str = ""
) -> int:
    """Publish into a fence: only if its newest message is the one with sequence `expected`.

    Args:
        expected: 0 for none.
        fence: subjects of its messages; "": of all about the message's key.
        headers: further headers.
        task: of a message that names none.

    Raises:
        Fenced: the known message is no longer the newest, because another worker continued.
        Unpublishable: as of `publish`.
    """
    topic = bus.tables.topic_for(message)
    body, key = await _body(bus, topic, message), topic.key_of(message)
    pool = bus.tables.pool_name(topic, task) or _pool(bus, topic, message)
    fence = fence or topic.fence(bus.run, key, pool)
    headers = _headers(topic, message, body) | (headers or {})
    headers |= {EXPECT_SUBJECT: str(expected), EXPECT_FILTER: fence}
    try:
        return await _store(bus, topic, topic.subject(bus.run, key, pool), body, headers)
    except WrongSequence:
        # A lost acknowledgement answers its repeat in this way too: it is ours if the newest message has our id.
        newest = await read_newest(bus, topic.stream, fence)
        if newest is not None and newest.headers.get(MESSAGE_ID) == headers[MESSAGE_ID]:
            return newest.sequence
        raise Fenced(f"{key}: another worker has taken over this work") from None


def _headers(topic: Topic[Message], message: Message, body: bytes) -> dict[str, str]:
    content = time.time_ns() if topic.repeats else xxhash.xxh3_64_hexdigest(body)
    return {MESSAGE_ID: f"{topic.id_of(message)}:{content}"} | headers_of(message)


def _pool(bus: Bus, topic: Topic[Any], message: Message) -> str:
    return bus.tables.pool_name(topic, getattr(message, "task", ""))


async def _store(bus: Bus, topic: Topic[Any], subject: str, body: bytes, headers: dict[str, str]) -> int:
    """Store a body under a subject, in a blob stream if it is large.

    Raises:
        TwoContents: another content is stored under this message id.
    """
    stored = body
    if len(body) > chunk_bytes(bus):
        sequence = int(headers[EXPECT_LAST]) + 1 if EXPECT_LAST in headers else 0
        headers[BLOB] = await store_blob(bus, topic, in_chunks(bus, body), sequence)
        stored = b""
    if bus.name:
        headers[BY] = bus.name
    ack = await bus.store(subject, stored, headers)
    if ack.duplicate:
        # A repeat counts as stored only if the stored message is equal.
        there = await read_message(bus, topic.stream, ack.seq)
        if there is not None and await body_of(bus, there) != body:
            raise TwoContents(f"{headers[MESSAGE_ID]}: message {ack.seq} has this id and another content")
    return ack.seq


async def read(bus: Bus, kind: type[M], record: Record) -> M:
    """Decode a record, fetching its blob if it has one.

    Raises:
        WireError: it is no such message, or not the one that its subject names.
        BlobMissing: its blob is gone or damaged.
        SecretGone: it is sealed under a data key that is not there.
    """
    topic = bus.tables.topic_of(record.subject)
    if topic is None or not issubclass(topic.message, kind):
        raise WireError(f"a message on {record.subject}, expected a {kind.__name__}")
    message: M = _decoded(topic, record, await open_body(bus, topic, record, await body_of(bus, record)))
    return message


def unpack(record: Record, body: bytes | None, tables: Tables = BUILT_IN) -> tuple[Topic[Any], Any]:
    """The topic of a record of a log, and its message.

    Args:
        body: None if only the headers are read; then they represent the message.
        tables: of the run.

    Raises:
        WireError: it is no such message, or not the one that its subject and its headers name.
    """
    topic = _topic_at(record, tables)
    if body is not None:
        return topic, _decoded(topic, record, body)
    return topic, _headers_at(topic, record)


def _decoded(topic: Topic[Any], record: Record, body: bytes) -> Any:
    message = decode_body(topic, body)
    _check_names(topic, message, record)
    return message


def decode_body(topic: Topic[Any], body: bytes) -> Any:
    """The message of a topic as `pack` wrote it, without a check of subject and headers.

    Raises:
        WireError: it is no such message.
    """
    if not topic.json:
        return decode(topic.message, body)
    try:
        return msgspec.json.decode(body, type=topic.message)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"not a {topic.message.__name__}: {error}") from error


def _headers_at(topic: Topic[Any], record: Record) -> Headers:
    kind: type[Headers] = topic.message.HEADERS
    named = record.key
    if topic.key in kind.__struct_fields__:
        given = record.headers.get(topic.key.removesuffix("_id"))
        if not _pattern(topic).match(named) or given != named:
            raise WireError(f"its subject names {named!r}, its headers {given!r}")
    return kind.read(record.headers)


def _topic_at(record: Record, tables: Tables) -> Topic[Any]:
    topic = tables.topic_of(record.subject)
    if topic is None or topic.stream is not record.stream:
        raise WireError("its subject is in no row of the topic table")
    if record.stream.keeper and not record.headers.get(WRITER):
        raise WireError(f"on the log that the {record.stream.keeper} alone writes, and it names no writer")
    return topic


def _check_names(topic: Topic[Any], message: Message, record: Record) -> None:
    """Refuse a message whose ids contradict its subject, its headers or each other."""
    if topic.key:
        given, named = getattr(message, topic.key), record.key
        if given != named:
            raise WireError(f"its subject names {topic.key} {named[:80]!r}, its body {given[:80]!r}")
        if not _pattern(topic).match(named):
            raise WireError(f"{named[:80]!r} is no {topic.key}")
        # Of other keys than a trajectory's, `member` says whom the message is about.
        member = getattr(message, "member", None) if topic.key == "trajectory_id" else None
        if member is not None and named != trajectory_name(getattr(message, "prompt_id", ""), member):
            raise WireError(f"{named!r} is not member {member} of its prompt {getattr(message, 'prompt_id', '')!r}")
        if member is not None and member >= (size := getattr(message, "group_size", member + 1)):
            raise WireError(f"{named!r} is no member of a group of {size}")
    expected, found = headers_of(message), record.headers
    expected = {name: value for name, value in expected.items() if name not in _ADDED or name in found}
    if not expected.items() <= found.items():
        name, value = next(item for item in expected.items() if found.get(item[0]) != item[1])
        raise WireError(f"its header {name} is {found.get(name, '')[:80]!r}, its body has {value!r}")


def _pattern(topic: Topic[Any]) -> re.Pattern[str]:
    return TRAJECTORY_ID if topic.key == "trajectory_id" else _ID


def attempt_of(record: Record) -> int | None:
    """The attempt in a record's header; None for an invalid number."""
    text = record.headers.get("attempt", "")
    return int(text) if text.isdecimal() and len(text) < 11 else None


async def _body(bus: Bus, topic: Topic[Any], message: Message) -> bytes:
    """The body of a message that can be read again.

    Raises:
        Unpublishable, SecretGone: as of `publish`.
    """
    key = topic.key_of(message)
    try:
        if topic.key and not _pattern(topic).match(key):  # in a subject a dot or a space has another meaning
            expected = "a name as p000042-3" if topic.key == "trajectory_id" else "1 to 128 letters, digits, - and _"
            raise WireError(f"its {topic.key} is {key[:80]!r}; expected {expected}")
        body = pack(message, topic)
        if "operator" in topic.publishers or topic.publishers[0] not in OWN:
            decode_body(topic, body)  # typed input and messages of users' programs may be anything
        return await _under_keys(bus, topic, message, body)
    except WireError as error:
        raise Unpublishable(f"{topic.name} cannot be published: {error}") from error


async def _sealed(bus: Bus, topic: Topic[Any], message: Message) -> bytes:
    """The body of a message in its stored form: encrypted, if it names data keys."""
    return await _under_keys(bus, topic, message, pack(message, topic))


async def _under_keys(bus: Bus, topic: Topic[Any], message: Message, body: bytes) -> bytes:
    secrets = getattr(message, SEALED, "")
    return await seal_body(bus, topic, topic.key_of(message), secrets, body) if secrets else body


async def body_of(bus: Bus, record: Record) -> bytes:
    """The stored body of a record, from the blob stream if necessary."""
    reference = record.headers.get(BLOB)
    if reference is None:
        return record.data
    topic = bus.tables.topic_of(record.subject)
    return await fetch_blob(bus, BLOBS if topic is None else topic.blobs, reference)


async def check_beside(bus: Bus, record: Record) -> None:
    """Refuse a record whose blob of experts is gone or damaged.

    Raises:
        WireError: its header is no reference to one.
        BlobMissing: chunks are gone, or differ.
    """
    if ROUTING in record.headers:
        await fetch_blob(bus, BLOBS, record.headers[ROUTING])


async def read_result(bus: Bus, payload: Reference) -> TrajectoryGenerated:
    """The result of a trajectory, by the reference with which a grade or a batch names it.

    Raises:
        BlobMissing: it is gone.
        WireError: these are not the tokens that were graded.
        SecretGone: it is sealed under a data key that is not there.
    """
    record = await read_message(bus, TRAJECTORIES, payload.sequence)
    if record is None:
        raise BlobMissing(f"the tokens in message {payload.sequence} are gone")
    body = await body_of(bus, record)
    if (digest := xxhash.xxh3_64_hexdigest(body)) != payload.digest:
        raise WireError(f"the tokens in message {payload.sequence} have digest {digest}, {payload.digest} was graded")
    return decode(TrajectoryGenerated, await open_body(bus, TRAJECTORY_GENERATED, record, body))
