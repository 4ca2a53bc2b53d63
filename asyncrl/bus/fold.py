"""Folds: state as a pure function of messages, with one method for each type of message."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, TypeVar

from asyncrl.bus.log import Record
from topics.table import topic_of_type
from topics.topic import Stream, Topic
from topics.wire import Message

F = TypeVar("F")
M = TypeVar("M", bound=Message)
_Method = Callable[[F, M, Record], None]
_MARKED: dict[Callable[..., None], tuple[type[Message], bool]] = {}  # methods: what each folds, and whether by headers


def on(kind: type[M]) -> Callable[[_Method[F, M]], _Method[F, M]]:
    """Mark the method that folds in the messages of a type."""

    def mark(method: _Method[F, M]) -> _Method[F, M]:
        _MARKED[method] = (kind, False)
        return method

    return mark


def on_headers(kind: type[Message]) -> Callable[[Callable[[F, Record], None]], Callable[[F, Record], None]]:
    """Mark the method that folds in the records of a type of message by their headers alone."""

    def mark(method: Callable[[F, Record], None]) -> Callable[[F, Record], None]:
        _MARKED[method] = (kind, True)
        return method

    return mark


class Input(NamedTuple):
    """The topics of a log that a fold reads."""

    topics: list[Topic[Any]]
    headers_only: bool


class Fold:
    """Base of folds: `apply` calls the method that is marked for the type; other types change nothing."""

    _methods: ClassVar[dict[type[Message], tuple[Callable[..., None], bool]]] = {}

    def __init_subclass__(cls) -> None:
        marked = [
            (member, *_MARKED[member])
            for member in vars(cls).values()
            if isinstance(member, FunctionType) and member in _MARKED
        ]
        cls._methods = cls._methods | {kind: (method, by_headers) for method, kind, by_headers in marked}

    @classmethod
    def inputs(cls) -> dict[Stream, Input]:
        """The logs that it reads; headers are enough of those of which all methods are marked so."""
        found: dict[Stream, Input] = {}
        for kind, (_, by_headers) in cls._methods.items():
            topic = topic_of_type(kind)
            known = found.get(topic.stream, Input([], headers_only=True))
            found[topic.stream] = Input([*known.topics, topic], known.headers_only and by_headers)
        return found

    def refuse(self, record: Record, error: Exception) -> None:
        """Take note of a message that cannot be read; here it is passed over, for the run has it as a dead letter."""

    def apply(self, topic: Topic[Message], message: Message | None, record: Record) -> None:
        """Fold one message in; it is None where only headers are read."""
        method, by_headers = self._methods.get(topic.message, (None, False))
        if method is None:
            return
        if by_headers:
            method(self, record)
        else:
            method(self, message, record)
