"""Calls and answers as they travel to ranks that are processes: length-prefixed MessagePack over a local socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec

from actors.learner.rank import Rank
from actors.learner.teacher_fault import TeacherFault
from actors.runtime.actor import ActorFault
from asyncrl.algorithms.named import AlgorithmError
from asyncrl.errors import AsyncRLError
from asyncrl.training.checkpoint import CheckpointError, OtherModel
from asyncrl.training.protocol import NonFiniteLoss, NonFiniteWeights, RowError, Trainer
from asyncrl.training.publisher import Publisher

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


_OWNERS: dict[str, type[Any]] = {owner.__name__: owner for owner in (Rank, Publisher, Trainer)}


class Call(msgspec.Struct, array_like=True):
    """A call of a method of a rank, its publisher or its trainer."""

    number: int
    name: str  # such as "Publisher.prepare"
    arguments: list[msgspec.Raw]

    @property
    def method(self) -> Callable[..., Any]:
        """The method, of a class: its object is found by the rank."""
        owner, name = self.name.split(".")
        method: Callable[..., Any] = getattr(_OWNERS[owner], name)
        return method

    def given(self) -> list[Any]:
        """Return the arguments, of the types that the method names."""
        kinds = [kind for name, kind in get_type_hints(self.method).items() if name != "return"]
        return [_decoded(value, kind) for value, kind in zip(self.arguments, kinds, strict=True)]

    def answer(self, value: bytes) -> Any:
        """Return the answer of a rank, of the type that the method names."""
        return _decoded(value, get_type_hints(self.method)["return"])

    @property
    def is_independent(self) -> bool:
        """Return whether no rank waits for another one in it.

        Such a call uses copied data, and may run together with others. Other calls run one after the other.
        """
        of_copy = self.name.startswith("Publisher.") and not self.name.startswith("Publisher.copy_")
        return of_copy or self.name == "Rank.gather"


def encoded(value: Any) -> msgspec.Raw:
    """Return an argument or an answer as it travels."""
    return msgspec.Raw(msgspec.msgpack.encode(value, enc_hook=str))  # a path


def _decoded(value: bytes | msgspec.Raw, kind: Any) -> Any:
    return msgspec.msgpack.decode(value, type=kind, dec_hook=lambda of_path, text: of_path(text))


class Reply(msgspec.Struct, array_like=True):
    """The answer of a rank to a call; without a number a heartbeat, as which the first one names the rank."""

    rank: int
    number: int | None = None
    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str = ""  # name of a class in `ERRORS`
    reason: str = ""
