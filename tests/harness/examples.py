"""One example of each message type."""

import types
import typing
from functools import cache
from typing import Any

import msgspec
import numpy as np

from topics import wire
from topics.keys import KeyAdded
from topics.trajectories import Segment
from topics.wire import SEALED

OF_KIND = {Segment: {"mask": np.array([0, 1, 1], np.uint8), "logprobs": np.array([-1.0, -2.0, -3.0], np.float32)}}
ARRAYS = {wire.Int32Array: "<i4", wire.Float32Array: "<f4", wire.UInt8Array: "u1"}


def example(kind: Any) -> Any:
    """A value of a type, every field given, nothing at its default."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return arguments[0]
    if origin is list:
        return [example(arguments[0])]
    if origin is tuple:
        return tuple(example(argument) for argument in arguments)
    if origin is dict:
        return {example(arguments[0]): example(arguments[1])}
    if origin in (typing.Union, types.UnionType):
        return example(arguments[0])
    if kind in ARRAYS:
        return np.arange(1, 4).astype(ARRAYS[kind])
    if kind is KeyAdded:
        limits = {"requests_per_minute": 7, "tokens_per_day": 7, "private": True}
        return KeyAdded(key_id="k1", tenant="anna", digest="09af" * 16, **limits)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(**{name: example(field) for name, field in _fields(kind)} | OF_KIND.get(kind, {}))
    return {
        str: "p000042-3",
        int: 7,
        float: 0.25,
        bool: True,
        bytes: b"\x00\xff" + b"\x07" * 5,
        Any: {"free": [1, "x"]},
    }[kind]


@cache
def _fields(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    """Name and type of each field: read once, for tests make thousands of examples."""
    hints = typing.get_type_hints(kind)
    return [(field.name, hints[field.name]) for field in msgspec.structs.fields(kind)]


def unsealed(kind: Any) -> Any:
    """The example of a message type as it is published where there are no data keys."""
    message = example(kind)
    if hasattr(message, SEALED):
        setattr(message, SEALED, "")
    return message
