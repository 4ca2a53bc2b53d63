"""Messages between a learner and its ranks: length-prefixed MessagePack over a local socket."""

from __future__ import annotations

import msgspec

from actors.learner.rank import AnyCall
from actors.runtime.actor import ActorFault
from asyncrl.algorithms.named import AlgorithmError
from asyncrl.errors import AsyncRLError
from asyncrl.training.checkpoint import CheckpointError
from asyncrl.training.protocol import NonFiniteLoss, RowError

BEAT_S = 1.0  # seconds between two heartbeats
ERRORS: dict[str, type[AsyncRLError]] = {
    error.__name__: error for error in (ActorFault, AlgorithmError, CheckpointError, NonFiniteLoss, RowError)
}
"""Errors that a rank reports and survives; any other ends it."""


class NumberedCall(msgspec.Struct, array_like=True):
    """A call to a rank."""

    number: int
    call: AnyCall


class Reply(msgspec.Struct, array_like=True):
    """The answer of a rank to a call; without a number a heartbeat, as which the first one names the rank."""

    rank: int
    number: int | None = None
    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str = ""  # name of a class in `ERRORS`
    reason: str = ""
