"""Data of the user's own: a function that makes rows, and one that converts those of a file."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.data.messages import plain_type
from asyncrl.data.protocol import DataError
from asyncrl.errors import FunctionError, last_lines
from asyncrl.functions import Hangs, deadline, load_function
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


@contextmanager
def source_in_time(spec: str, function: Callable[..., Any]) -> Iterator[Callable[[], None]]:
    """Interrupt a user's source that hangs within the block, where it opens or makes its next row.

    Raises:
        DataError: with the line that it stood at.
    """
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    late = "without a row it had come to {}; return an object with row(index), which makes a row when it is asked for"
    try:
        with deadline(lambda frame: frame.f_code.co_filename == file, late) as row_came:
            yield row_came
    except Hangs as error:
        raise DataError(f"data {spec!r}: {error}") from error


def call_source(spec: str, function: Callable[..., Any], *, options: dict[str, Any], seed: int) -> Any:
    """Call a user's source, which returns rows, or an object that makes them by number.

    Raises:
        DataError: it does not take its arguments, or raises.
    """
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
