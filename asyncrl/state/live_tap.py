"""Following a run's logs from now on with bounded memory; skipped messages are counted; and their display."""

from __future__ import annotations

import asyncio
import difflib
from collections import deque
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record, read_newest
from asyncrl.errors import WrongUsage
from asyncrl.state.format_message import FormattedMessage
from topics.table import BUILT_IN, Tables
from topics.topic import Stream


class Condition(NamedTuple):
    """A field or header has a value; text may hold `*`."""

    key: str
    value: str

    def holds(self, formatted: FormattedMessage) -> bool:
        """Return whether a message meets it, in a header of this name or the field at this path."""
        if self.key in formatted.headers and fnmatchcase(formatted.headers[self.key], self.value):
            return True
        found = formatted.message
        for name in self.key.split("."):
            found = found.get(name) if isinstance(found, dict) else getattr(found, name, None)
        return found is not None and self._equals(found)

    def _equals(self, found: Any) -> bool:
        if isinstance(found, bool):
            return str(found).lower() == self.value.lower()
        if isinstance(found, int | float):
            try:
                return float(self.value) == found
            except ValueError:
                return False
        return fnmatchcase(str(found), self.value)


def no_topic(name: str, tables: Tables) -> WrongUsage:
    """Return the error about a name that no topic has, with those that are like it."""
    near = difflib.get_close_matches(name, list(tables.by_name))
    expected = f"{', '.join(near)}, or another" if near else "one"
    return WrongUsage(f"no topic is called {name!r}; expected {expected} that `asyncrl topics` lists")


def read_condition(word: str) -> Condition:
    """`KEY=VALUE`.

    Raises:
        WrongUsage: it is not of this form.
    """
    key, sign, value = word.partition("=")
    if not key or not sign:
        raise WrongUsage(f"--where {word!r}: expected KEY=VALUE, such as reason=reward")
    return Condition(key, value)


def types_at(kind: Any, path: Sequence[str]) -> list[Any]:
    """Return the types at a path of fields in values of a type; empty for an unknown path."""
    if get_origin(kind) in (Union, UnionType):
        return [found for part in get_args(kind) if part is not NoneType for found in types_at(part, path)]
    if not path or kind is Any:
        return [kind]
    if get_origin(kind) is dict:
        return types_at(get_args(kind)[1], path[1:])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and path[0] in kind.__struct_fields__:
        return types_at(get_type_hints(kind)[path[0]], path[1:])
    return []


def may_be(kind: Any, value: str) -> bool:
    """Return whether a field of a type can have the value of the command line."""
    if kind is bool:
        return value.lower() in ("true", "false")
    if kind in (int, float):
        try:
            float(value)
        except ValueError:
            return False
    return get_origin(kind) is not Literal or any(fnmatchcase(str(option), value) for option in get_args(kind))


def described(kind: Any) -> str:
    """Describe a type."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    return "true or false" if kind is bool else "a number"


_HANDFUL = 256  # messages taken at once
_WAITING = 8192  # messages that wait to be shown; what comes on top is missed
_WAITING_BYTES = 64 * 1024 * 1024
_HEADERS = {"trajectory", "attempt", "delivery", "stage", "group-size", "min-version", "versions", "reason", "step"}
_HEADERS |= {"by", "writer", "origin", "log", "offset", "blob"}


class Pattern:
    """Patterns of subjects to subscribe to: `noun.participle[.key]`, each part with `*` and `?` as in file names.

    Raises:
        WrongUsage: no topic has such a name.
    """

    def __init__(self, text: str, tables: Tables = BUILT_IN) -> None:
        self._text = "*" if text == ">" else text
        self._parts = self._text.split(".", 2)
        name = ".".join(self._parts[:2])
        self._topics = [
            one for one in tables.topics if fnmatchcase(one.name, name) or fnmatchcase(one.name, f"{name}.*")
        ]
        if not self._topics:
            raise no_topic(name, tables)

    def subjects(self, run: str) -> list[str]:
        """Return every subject that may match, in the table or not."""
        tokens = ["*" if set(part) & set("*?[") else part for part in self._parts[:2]]
        base = ".".join(["asyncrl", run, *tokens])
        return [base, f"{base}.>"] if len(self._parts) == 2 else [f"{base}.>"]

    def matches(self, subject: str) -> bool:
        """Return whether a subject is meant: that of a heartbeat where the pattern names heartbeats."""
        parts = subject.split(".")
        if parts[3:4] == ["heartbeat"] and "heartbeat" not in self._text:
            return False
        rest = ".".join([*parts[2:4], *parts[4:][-1:]])
        return fnmatchcase(rest, self._text) or fnmatchcase(rest, f"{self._text}.*")

    def check_conditions(self, conditions: Iterable[Condition]) -> None:
        """Refuse conditions that no message of these topics can meet.

        Raises:
            WrongUsage: a key is neither a header nor a field of any of them, or no such field can have its value.
        """
        for key, value in conditions:
            kinds = [(topic.name, kind) for topic in self._topics for kind in types_at(topic.message, key.split("."))]
            if not kinds and key not in _HEADERS:
                fields = {field for topic in self._topics for field in topic.message.__struct_fields__} - {"v"}
                known = ", ".join(sorted(fields))
                raise WrongUsage(f"--where {key}=...: no message of {self._text} has a {key!r}; fields: {known}")
            if kinds and not any(may_be(kind, value) for _, kind in kinds):
                name, kind = kinds[0]
                raise WrongUsage(f"--where {key}={value}: {key} of {name} is {described(kind)}")

    def concerns(self, stream: Stream) -> bool:
        """Return whether a stream holds wanted messages."""
        return any(topic.stream is stream for topic in self._topics)


class LiveTap:
    """Reads into a bounded queue; `missed` counts what found it full."""

    def __init__(self, bus: Bus, pattern: Pattern, *, most: int = _WAITING, most_bytes: int = _WAITING_BYTES) -> None:
        self._bus = bus
        self._pattern = pattern
        self._most = most
        self._most_bytes = most_bytes
        self._queue: deque[FormattedMessage] = deque()
        self._bytes = 0
        self._news = asyncio.Event()
        self._readers: list[LogReader] = []
        self.missed = 0

    async def start(self) -> None:
        """Begin after the newest stored message."""
        subjects = self._pattern.subjects(self._bus.run)
        for stream in self._bus.tables.streams:
            if self._pattern.concerns(stream) and not stream.closed:
                newest = await read_newest(self._bus, stream)
                after = 0 if newest is None else newest.sequence
                self._readers.append(LogReader(self._bus, stream, self._receive, after=after, subjects=subjects))
                await self._readers[-1].start()

    async def close(self) -> None:
        """Follow no more."""
        for reader in self._readers:
            await reader.close()

    @property
    def waiting(self) -> int:
        """Messages that wait to be shown."""
        return len(self._queue)

    def take(self) -> list[FormattedMessage]:
        """The next handful, oldest first."""
        taken = [self._queue.popleft() for _ in range(min(_HANDFUL, len(self._queue)))]
        self._bytes -= sum(len(formatted.data) for formatted in taken)
        return taken

    async def news(self) -> None:
        """Wait until something was published."""
        self._news.clear()
        if not self._queue:
            await self._news.wait()

    def _receive(self, record: Record) -> None:
        if not self._pattern.matches(record.subject):
            return
        if len(self._queue) >= self._most or self._bytes + len(record.data) > self._most_bytes:
            self.missed += 1
            return
        self._queue.append(FormattedMessage.of_record(record, self._bus.tables))
        self._bytes += len(record.data)
        self._news.set()
