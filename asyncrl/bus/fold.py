"""Folds: state as a pure function of messages, with one method for each type of message."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeAlias, get_args, get_type_hints

from asyncrl.bus.log import Record
from topics.table import BUILT_IN, Tables
from topics.topic import Stream, Topic
from topics.wire import Headers, Message

_Kind: TypeAlias = type[Message | Headers]


class Input(NamedTuple):
    """The topics of a log that a fold reads."""

    topics: list[Topic[Any]]
    headers_only: bool


class Fold:
    """Base of folds: `apply` calls the method `_on_...` whose message has the type; other types change nothing.

    A method whose message is the headers of a type folds in by these alone.
    """

    _methods: ClassVar[dict[_Kind, Callable[..., None]]] = {}  # by the type of the message, or of its headers

    def __init_subclass__(cls) -> None:
        members = [one for name, one in vars(cls).items() if name.startswith("_on_")]
        cls._methods = cls._methods | {_kind_of(member): member for member in members}

    @classmethod
    def inputs(cls, tables: Tables = BUILT_IN) -> dict[Stream, Input]:
        """The logs that it reads; headers are enough of those of which all methods are marked so."""
        found: dict[Stream, Input] = {}
        for kind in cls._methods:
            topic, by_headers = tables.topic_of_type(kind), issubclass(kind, Headers)
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


def _kind_of(method: Callable[..., None]) -> _Kind:
    """Return the type of a method's message; of a union, for readers of bodies or headers, the first."""
    message = next(iter([*inspect.signature(method).parameters][1:]), "")  # after `self`
    annotation = get_type_hints(method).get(message)
    if annotation is None:
        raise TypeError(
            f"{method.__qualname__} names no type of message; expected (self, message: TYPE, record: Record)"
        )
    kind: _Kind = next(iter(get_args(annotation)), annotation)
    if not issubclass(kind, Message | Headers):
        raise TypeError(f"{method.__qualname__} takes {kind.__name__}, expected a type of messages or of their headers")
    return kind
