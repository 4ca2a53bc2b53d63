"""Calls of an engine actor to the process that brings weights to its server, and the answers."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from asyncrl.weights.transfer_manifest import Described, GroupPlace


class Open(msgspec.Struct, tag=True):
    """Map the tensors of a rank; answered by their descriptions."""

    tensors: list[bytes]  # as `weights.offered` has them


class Join(msgspec.Struct, tag=True):
    """Join a group, as its rank 0."""

    place: GroupPlace
    timeout_s: float


class Send(msgspec.Struct, tag=True):
    """Send the tensors of one call."""

    call: int  # its number


class Stage(msgspec.Struct, tag=True):
    """Copy the tensors of a directory into memory that other processes can map."""

    directory: str
    device: str  # "cpu" or "cuda"
    spare: int  # bytes of GPU memory that must stay free


Command: TypeAlias = Open | Join | Send | Stage


class Answer(msgspec.Struct):
    """The answer to a command."""

    error: str = ""
    calls: list[list[Described]] = []  # tensors by the call that they travel in
    packed: bytes = b""  # of staged tensors, see `asyncrl.weights.shared`
