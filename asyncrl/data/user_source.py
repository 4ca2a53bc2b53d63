"""Data of the user: a function that makes rows."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from asyncrl.data.file_source import FileSource, Wanted, load_data_function
from asyncrl.data.messages import plain_type
from asyncrl.data.row_fields import Keys, encode_row
from asyncrl.environments.protocol import DataError, DataSource
from asyncrl.errors import last_lines
from asyncrl.functions import Hangs, deadline
from topics.prompts import PromptRow

_MOST_ROWS = 4_000_000  # of an iterator of the user's, which might have no end
_REPORT_S = 10.0  # between two lines about a source that lists its rows


@contextmanager
def source_in_time(spec: str, function: Callable[..., Any], row_limit_s: float) -> Iterator[Callable[[], None]]:
    """Interrupt a user's source that hangs within the block, while it opens or makes its next row.

    How many rows have come is printed every few seconds: it shows that the source is slow, and does not hang.

    Raises:
        DataError: with the line of the hang.
    """
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    late = "without a row; it had reached {}; raise task.row_limit_s, or return an object with row(index), which makes "
    late += "a row when it is asked for"
    rows, begun_s, over = 0, time.monotonic(), threading.Event()

    def report() -> None:
        while not over.wait(_REPORT_S):
            print(f"data {spec!r}: {rows:,} rows after {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)

    threading.Thread(target=report, daemon=True).start()
    try:
        with deadline(row_limit_s, lambda frame: frame.f_code.co_filename == file, late) as again:

            def row_came() -> None:
                nonlocal rows
                rows += 1
                again()

            yield row_came
    except Hangs as error:
        raise DataError(f"data {spec!r}: {error}") from error
    finally:
        over.set()


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


def open_function(wanted: Wanted) -> DataSource:
    """Call a function of the user, which gives rows, or an object that makes them by number."""
    spec, function = wanted.spec, load_data_function(wanted.spec, wanted.base)

    def encode(value: Any) -> bytes:
        value = msgspec.structs.asdict(value) if isinstance(value, PromptRow) else value
        return encode_row(value, Keys(), wanted.labels_for)

    with source_in_time(spec, function, wanted.row_limit_s) as row_came:
        found = call_source(spec, function, options=wanted.options, seed=wanted.seed)
        if callable(getattr(found, "row", None)):
            return UserSource(found, encode, name=spec)
        return FileSource(_rows_of(spec, found, encode, row_came), seed=wanted.seed, name=spec)


def _rows_of(
    spec: str, found: Iterable[Any], encode: Callable[[Any], bytes], row_came: Callable[[], None]
) -> list[bytes]:
    rows = []
    for number, value in enumerate(found):
        row_came()
        if number >= _MOST_ROWS and not hasattr(found, "__len__"):
            message = f"its iterator gave {_MOST_ROWS:,} rows and more, which are all held in memory"
            raise DataError(
                f"data {spec!r}: {message}; return a list, or for rows without end an object with row(index)"
            )
        try:
            rows.append(encode(value))
        except (DataError, ValueError, OverflowError, TypeError) as error:
            raise DataError(f"data {spec!r}: row {number}: {error}") from error
    if not rows:
        raise DataError(f"data {spec!r} has no row")
    return rows
