"""Weights on their way to a server, as the calls that announce them describe them."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class GroupPlace(NamedTuple):
    """A meeting place of the processes of a group."""

    backend: str  # "nccl" or "gloo"
    address: str  # of rank 0, which sends
    port: int
    name: str  # of the group
    size: int  # ranks


class Described(msgspec.Struct):
    """A tensor."""

    name: str
    dtype: str  # "bfloat16"
    shape: list[int]
    bytes: int
