"""Folds: state as a pure function of messages, with one method for each type of message."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import msgspec

from asyncrl.bus.log import Record
from topics.table import topic_of_type
from topics.topic import Stream, Topic
from topics.wire import Headers, Message

F = TypeVar("F")
M = TypeVar("M", bound=Message | Headers)
_Method = Callable[[F, M, Record], None]
_Kind: TypeAlias = type[msgspec.Struct]
_MARKED: dict[Callable[..., None], _Kind] = {}  # methods: what each folds


def on(kind: type[M]) -> Callable[[_Method[F, M]], _Method[F, M]]:
    """Mark the method that folds in the messages of a type, or by their headers alone those that have such headers."""

    def mark(method: _Method[F, M]) -> _Method[F, M]:
        _MARKED[method] = kind
        return method

    return mark


class Input(NamedTuple):
    """The topics of a log that a fold reads."""

    topics: list[Topic[Any]]
    headers_only: bool


class Fold:
    """Base of folds: `apply` calls the method that is marked for the type; other types change nothing."""

    _methods: ClassVar[dict[_Kind, Callable[..., None]]] = {}  # by the type of the message, or of its headers

    def __init_subclass__(cls) -> None:
        members = [one for one in vars(cls).values() if isinstance(one, FunctionType) and one in _MARKED]
        cls._methods = cls._methods | {_MARKED[member]: member for member in members}

    @classmethod
    def inputs(cls) -> dict[Stream, Input]:
        """The logs that it reads; headers are enough of those of which all methods are marked so."""
        found: dict[Stream, Input] = {}
        for kind in cls._methods:
            topic, by_headers = topic_of_type(kind), issubclass(kind, Headers)
            known = found.get(topic.stream, Input([], headers_only=True))
            found[topic.stream] = Input([*known.topics, topic], known.headers_only and by_headers)
        return found

    def refuse(self, record: Record, error: Exception) -> None:
        """Take note of a message that cannot be read; here it is passed over, for the run has it as a dead letter."""

    def apply(self, topic: Topic[Message], message: Message | Headers, record: Record) -> None:
        """Fold one message in, or its headers where only these are read."""
        if (method := self._methods.get(topic.message)) is not None:
            method(self, message, record)
        elif (method := self._methods.get(kind := topic.message.HEADERS)) is not None:
            method(self, kind.of(message) if isinstance(message, Message) else message, record)
