"""Messages between a learner and its ranks: length-prefixed MessagePack over a local socket."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from actors.runtime.actor import ActorFault
from asyncrl.algorithms.named import AlgorithmError
from asyncrl.errors import AsyncRLError
from asyncrl.training.checkpoint import CheckpointError
from asyncrl.training.protocol import NonFiniteLoss, RowError

Method: TypeAlias = Literal[
    "open", "load", "fetch", "step", "copy_weights", "copy_state", "digest", "publish", "save", "export"
]
BESIDE = ("fetch", "publish", "save")  # answered while another call is under way; all others come one after the other
BEAT = b"\xc0"  # the frame of a heartbeat
BEAT_S = 1.0  # seconds between two of them
ERRORS: dict[str, type[AsyncRLError]] = {
    error.__name__: error for error in (ActorFault, AlgorithmError, CheckpointError, NonFiniteLoss, RowError)
}
"""Errors that a rank reports and survives; any other ends it."""


class Hello(msgspec.Struct, array_like=True):
    """The first message of a rank."""

    rank: int


class Call(msgspec.Struct, array_like=True):
    """A method of the rank, with its arguments."""

    number: int
    method: Method
    values: list[Any]


class Reply(msgspec.Struct, array_like=True):
    """The answer to a call."""

    number: int
    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str = ""  # name of a class in `ERRORS`
    reason: str = ""


def error_of(reply: Reply) -> AsyncRLError:
    """Return the error that a rank reported."""
    return ERRORS[reply.error](reply.reason)
