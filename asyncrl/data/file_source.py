"""Rows of a JSONL or Parquet file in a seeded order without end."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asyncrl.data.row_fields import Keys
from asyncrl.data.row_files import read_rows
from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.environments.protocol import DataError, check_options
from asyncrl.epochs import epoch_order, row_at
from asyncrl.errors import FunctionError
from asyncrl.functions import load_function
from topics.prompts import PromptRow

_SLICE = re.compile(r"(?P<path>.*)@\[(?P<bounds>[^\]]*)\]")
_ENDINGS = (".jsonl", ".parquet")
FORMS = tuple(f"FILE{ending}" for ending in _ENDINGS)
"""How messages name a file."""


class Wanted(NamedTuple):
    """Data to be opened: the arguments of `asyncrl.data.sources.open_source`."""

    spec: str
    options: dict[str, Any]
    seed: int
    base: Path
    labels_for: str
    row_limit_s: float


def load_data_function(spec: str, base: Path) -> Callable[..., Any]:
    """Import a user's function of data.

    Raises:
        DataError: it cannot be found or loaded.
    """
    try:
        return load_function(spec, base=base)
    except FunctionError as error:
        raise DataError(f"data {spec!r}: {error}") from error


def _path_of(spec: str) -> tuple[str, str]:
    """Return the path in a text, and the bounds of its slice."""
    match = _SLICE.fullmatch(spec)
    return (match["path"], match["bounds"]) if match else (spec, ":")


def is_file(spec: str) -> bool:
    """Return whether data is named as a file, with or without a slice."""
    return _path_of(spec)[0].endswith(_ENDINGS)


def open_file(wanted: Wanted) -> FileSource:
    """Read a file; a function of the user may convert its rows."""
    (path, bounds), base = _path_of(wanted.spec), wanted.base
    keys = Keys(**check_options(wanted.spec, wanted.options, Keys.__struct_fields__))
    convert = load_data_function(keys.convert, base) if keys.convert else None
    rows = read_rows(base / path, bounds=bounds, keys=keys, labels_for=wanted.labels_for, convert=convert)
    return FileSource(rows, seed=wanted.seed, name=wanted.spec)


class FileSource:
    """Rows of a file: every epoch shows each row once, in the order that (seed, epoch) gives."""

    def __init__(self, rows: Sequence[bytes], *, seed: int, name: str, left_out: str = "") -> None:
        """
        Args:
            rows: each as MessagePack of a `PromptRow`.
            left_out: words about other rows of the file.
        """
        self.rows_per_epoch: int | None = len(rows)
        self._left_out = left_out
        self._rows = len(rows)
        self._seed = seed
        self._name = name
        # One block of bytes: a Python object per row would take several times the file.
        self._ends = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        self._block = memoryview(b"".join(rows))
        self._decoder = msgspec.msgpack.Decoder(PromptRow)

    def row(self, index: int) -> PromptRow:
        """The row at place `index` of the endless order."""
        number = row_at(index, self._rows, self._seed)
        return self._decoder.decode(self._block[self._ends[number] : self._ends[number + 1]])

    def longest(self, count: int) -> list[int]:
        """Places, in the first epoch, of the rows with the most bytes, the longest first."""
        sizes = np.diff(self._ends)[epoch_order(self._rows, self._seed, 0)]
        return [int(place) for place in np.argsort(-sizes, kind="stable")[:count]]

    def describe(self) -> str:
        """The file and its number of rows."""
        return f"{self._name}: {self._rows} rows{self._left_out}"

    def shortened(self, tokenizer: TaskTokenizer, max_tokens: int) -> FileSource:
        """Return the rows whose prompts have at most this many tokens.

        Raises:
            DataError: no row is left.
        """
        rows = [bytes(self._block[first:end]) for first, end in pairwise(self._ends)]
        kept = [row for row in rows if not _is_longer(self._decoder.decode(row), tokenizer, max_tokens)]
        longer = f"have prompts of more than task.max_prompt_tokens = {max_tokens:,} tokens"
        if not kept:
            raise DataError(f"{self._name}: all {len(rows)} rows {longer}; raise it")
        words = f"; {len(rows) - len(kept)} rows are left out, since they {longer}"
        return FileSource(kept, seed=self._seed, name=self._name, left_out=words)


def _is_longer(row: PromptRow, tokenizer: TaskTokenizer, max_tokens: int) -> bool:
    try:
        return len(tokenizer.encode_prompt(row, max_tokens=None)) > max_tokens
    except TokenizerError:
        return False  # the row is kept, and the check of rows reports it
