"""Calls and answers as they travel to ranks that are processes: length-prefixed MessagePack over a local socket."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from actors.learner.gpu_probe import TakeGpu
from actors.learner.publication import Publication
from actors.learner.rank import Training
from actors.learner.teacher_fault import TeacherFault
from actors.runtime.actor import ActorFault
from asyncrl.algorithms.named import AlgorithmError
from asyncrl.errors import AsyncRLError
from asyncrl.training.checkpoint import CheckpointError, OtherModel
from asyncrl.training.protocol import NonFiniteLoss, NonFiniteWeights, RowError

AnyCall: TypeAlias = TakeGpu | Training | Publication
NO_GPU = 5  # exit code of a rank whose GPU is not there, or does not work
BEAT_S = 1.0  # seconds between two heartbeats
ERRORS: dict[str, type[AsyncRLError]] = {
    error.__name__: error
    for error in (
        *(TeacherFault, ActorFault, AlgorithmError, CheckpointError, OtherModel),
        *(NonFiniteLoss, NonFiniteWeights, RowError),
    )
}
"""Errors that a rank reports and survives, a subclass before its base class; any other error ends the rank."""


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
