"""Calls of an engine actor to the process that sends weights to its server, and the answers."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from asyncrl.weights.described import Described, GroupPlace


class Open(msgspec.Struct, tag=True):
    """Map tensors; answered by their descriptions."""

    tensors: bytes  # as `weights.offered` has them


class Join(msgspec.Struct, tag=True):
    """Join a group, as its rank 0."""

    place: GroupPlace
    timeout_s: float


class Send(msgspec.Struct, tag=True):
    """Send some of the tensors."""

    names: list[str]


Command: TypeAlias = Open | Join | Send


class Answer(msgspec.Struct):
    """The answer to a command."""

    error: str = ""
    tensors: list[Described] = []
