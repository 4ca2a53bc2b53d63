"""Dispatch by message type: what a fold does with each message is one typed function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from asyncrl.bus.log import Record
from topics.wire import Message

M = TypeVar("M", bound=Message)


class Handlers:
    """One function for each message type that a fold reads."""

    def __init__(self) -> None:
        self._of: dict[type[Message], Callable[[Message, Record], None]] = {}

    def on(self, kind: type[M], handle: Callable[[M, Record], None]) -> None:
        """Set the function for messages of one type."""
        self._of[kind] = cast("Callable[[Message, Record], None]", handle)

    def apply(self, message: Message, record: Record) -> None:
        """Call the function of a message; one without a function is ignored."""
        handle = self._of.get(type(message))
        if handle is not None:
            handle(message, record)
