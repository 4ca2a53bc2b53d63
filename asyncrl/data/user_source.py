"""Data of the user's own: a function that makes rows, and one that converts those of a file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.data.messages import plain_type
from asyncrl.data.protocol import DataError
from asyncrl.errors import FunctionError, last_lines
from asyncrl.functions import load_function
from topics.prompts import PromptRow


def is_function(spec: str) -> bool:
    """Return whether data is named as a user's function: `path/to/file.py:function` or `package.module:function`."""
    where, _, name = spec.rpartition(":")
    return bool(where) and name.isidentifier() and where != "reasoning-gym"


def load_data_function(spec: str, base: Path) -> Callable[..., Any]:
    """Import a user's function of data.

    Raises:
        DataError: it cannot be found or loaded.
    """
    try:
        return load_function(spec, base=base)
    except FunctionError as error:
        raise DataError(f"data {spec!r}: {error}") from error


def call_source(spec: str, *, options: dict[str, Any], seed: int, base: Path) -> Any:
    """Call a user's source, which returns rows, or an object that makes them by number.

    Raises:
        DataError: it cannot be loaded, does not take its arguments, or raises.
    """
    function = load_data_function(spec, base)
    try:
        inspect.signature(function).bind(seed=seed, **options)
    except (TypeError, ValueError) as error:
        raise DataError(f"data {spec!r} is called with seed and its options, and {error}") from error
    try:
        found = function(seed=seed, **options)
    except Exception as error:  # anything may happen in a user's function
        raise DataError(f"data {spec!r} raises\n{last_lines(error)}") from error
    if not callable(getattr(found, "row", None)) and (not isinstance(found, Iterable) or isinstance(found, str | dict)):
        raise DataError(f"data {spec!r} answers {plain_type(found)}; expected rows, or an object with row(index)")
    return found


class UserSource:
    """Rows without end that an object of the user's makes by number."""

    def __init__(self, found: Any, encode: Callable[[Any], bytes], *, name: str) -> None:
        self.rows_per_epoch: int | None = None
        self._found, self._name = found, name
        self._encode = encode  # checks a row, and makes it MessagePack of a `PromptRow`
        self._decoder = msgspec.msgpack.Decoder(PromptRow)

    def row(self, index: int) -> PromptRow:
        """The row at place `index`."""
        return self._decoder.decode(self._encode(self._found.row(index)))

    def describe(self) -> str:
        """The function."""
        return f"{self._name}: rows without end"
