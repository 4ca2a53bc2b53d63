"""The frames between a process and its child processes, and what a child serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from asyncrl.errors import AsyncRLError

Reason: TypeAlias = Literal["raised", "value", "time_limit", "memory", "exited", "http", "closed"]


class CallFailed(AsyncRLError):
    """A call without a result.

    `reason` is `raised`, `value` (an invalid result), `time_limit`, `memory`, `exited` (the function ended its
    process), `http` (the address cannot be reached or refuses) or `closed` (its process was closed).
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class Service(NamedTuple):
    """The work of a child for its parent."""

    call: Callable[[Any], Any]  # takes a request of plain values
    finish: Callable[[Any], Any] = lambda value: value  # makes the result of what the call returned
    concurrent: bool = False  # calls are awaited, many at once
    about: Any = None  # for the parent


class Setup(msgspec.Struct):
    """First frame to a child: the service that it makes."""

    spec: str  # what errors call it
    service: str  # `module:function`, which makes a `Service` when called with the arguments
    arguments: dict[str, Any]
    time_limit_s: float  # of one call
    memory_mb: int = 0  # limit for each of its processes; 0 for none
    reply_bytes: int = 1 << 20  # of one reply, at most
    load_limit_s: float = 600.0  # until the service is made
    memory_key: str = ""  # of the setting that the limit comes from; "": none
    silent: bool = False  # its prints are dropped: they may repeat client text, and logs are not encrypted

    @property
    def memory_text(self) -> str:
        """The limit as failures name it."""
        return f"{self.memory_key} = {self.memory_mb:,} MB" if self.memory_key else f"{self.memory_mb:,} MB"


class Ready(msgspec.Struct):
    """First frame from a child: the service is made, or why not."""

    error: str = ""
    concurrent: bool = False
    pid: int = 0  # of the child, which leads its group; its supervisor has another
    about: Any = None


class Call(msgspec.Struct, array_like=True):
    """One request to a child."""

    id: int
    request: Any


class Reply(msgspec.Struct, array_like=True):
    """The result of a call."""

    id: int
    value: Any = None
    reason: Reason | None = None  # None with a value
    detail: str = ""
    leftover: bool = False  # a call was ended at its limit, and processes that it may have started live
