"""Prompts of a task: rows of a file, or rows made by a rule, in a seeded order without end."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from asyncrl.data import procedural
from asyncrl.data.curriculum import Ladder, LadderSource, at_level, level_of
from asyncrl.data.row_fields import WARMUP, Keys, encode_row
from asyncrl.data.row_files import read_rows
from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.data.user_source import UserSource, call_source, load_data_function, source_in_time
from asyncrl.environments.kinds import FORMS, environment_of, make
from asyncrl.environments.protocol import DataError, DataSource, check_options
from asyncrl.functions import is_function
from topics.prompts import PromptRow

_MOST_ROWS = 4_000_000  # of an iterator of the user's, which might have no end
_SLICE = re.compile(r"(?P<path>.*)@\[(?P<bounds>[^\]]*)\]")


def label_reader(*, graded: bool, warmup_steps: int) -> str:
    """Return the reader of the label of each row, so that a row without one is an error; empty without a reader.

    Args:
        graded: whether the reward reads it.
    """
    return "the reward" if graded else WARMUP if warmup_steps else ""


def open_source(
    spec: str, *, options: dict[str, Any], seed: int, base: Path, labels_for: str = "", row_limit_s: float = 300.0
) -> DataSource:
    """Open the data that `spec` names.

    Args:
        spec: `file.jsonl` or `file.parquet`, each with an optional slice such as `@[0:100]` or `@[-50:]`; `reverse`;
            `sum`; an environment as `KIND:NAME`; or a user's `path/to/file.py:function` or `package.module:function`.
        options: for files `prompt_key`, `label_key`, `metadata_key`, `tools_key` and `convert`, a user's function of a
            row; for rules and functions their own.
        seed: of the order, and of made rows. For held-out data give a file another slice, and a rule another seed:
            rules draw by a hash of seed and place, so two seeds give unrelated draws. They can then meet by chance
            only, one held-out prompt with probability of about (rows trained on) / (prompts there are).
        labels_for: the reader of labels, as by `label_reader`.
        row_limit_s: seconds that a user's function may take for each row that it lists.

    Raises:
        DataError: names the fault of spec, options or file.
    """
    match = _SLICE.fullmatch(spec)
    path = match["path"] if match else spec
    if path.endswith((".jsonl", ".parquet")):
        keys = Keys(**check_options(spec, options, Keys.__struct_fields__))
        convert = load_data_function(keys.convert, base) if keys.convert else None
        bounds = match["bounds"] if match else ":"
        rows = read_rows(base / path, bounds=bounds, keys=keys, labels_for=labels_for, convert=convert)
        return FileSource(rows, seed=seed, name=spec)
    if is_function(spec):
        function = load_data_function(spec, base)
        with source_in_time(spec, function, row_limit_s) as row_came:
            found = call_source(spec, function, options=options, seed=seed)
            return _user_source(spec, found, row_came, seed=seed, labels_for=labels_for)
    if spec in procedural.RULES:
        return procedural.RULES[spec](options, seed)
    if (named := environment_of(spec)) is not None:
        return make(*named, options, seed)
    functions = ("FILE.py:FUNCTION", "MODULE:FUNCTION")
    known = ", ".join(["FILE.jsonl", "FILE.parquet", *procedural.RULES, *FORMS, *functions])
    folder = path.rpartition("/")[2]
    get = f"hf download {path} --repo-type dataset --local-dir {folder}, then name a file such as {folder}/rows.parquet"
    hub = f"; fetch a data set of a hub first: {get}" if path.count("/") == 1 else ""
    raise DataError(f"unknown data {spec!r}; known are {known}{hub}")


def _user_source(spec: str, found: Any, row_came: Callable[[], None], *, seed: int, labels_for: str) -> DataSource:
    def encode(value: Any) -> bytes:
        value = msgspec.structs.asdict(value) if isinstance(value, PromptRow) else value
        return encode_row(value, Keys(), labels_for)

    if callable(getattr(found, "row", None)):
        return UserSource(found, encode, name=spec)
    return FileSource(_rows_of(spec, found, encode, row_came), seed=seed, name=spec)


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


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), a bijection of 64-bit words."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=8)
def epoch_order(rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The permutation of `rows` rows in one epoch.

    Sorting by hashed keys keeps it the same under every version of numpy.

    Returns:
        [rows] int64 row numbers.
    """
    words = np.array([seed & 0xFFFFFFFFFFFFFFFF, epoch], np.uint64)
    start, step = _mix(_mix(words) + np.array([1, 2], np.uint64))
    keys = _mix(_mix(np.arange(rows, dtype=np.uint64) + start) ^ step)
    return np.argsort(keys, kind="stable")


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
        epoch, place = divmod(index, self._rows)
        number = epoch_order(self._rows, self._seed, epoch)[place]
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


class RowsPart(msgspec.Struct):
    """The data of one task. The fields are arguments of `open_source`."""

    spec: str
    options: dict[str, Any] = {}
    labels_for: str = ""
    ladder: Ladder | None = None  # its difficulty, with a curriculum
    max_tokens: int = 0  # of a prompt in a file; 0: any


class RowSetup(msgspec.Struct):
    """The data whose rows are made."""

    parts: list[RowsPart]
    turns: list[int]  # numbers of the parts in whose turn rows are taken, again and again
    seed: int
    base: str
    row_limit_s: float = 300.0  # that making one row may take
    open_limit_s: float = 600.0  # that opening may take
    longest: int = 0  # this many of the longest rows of an open file are named
    model: str = ""  # directory of the model whose tokens are counted

    @property
    def functions(self) -> list[str]:
        """The user's functions that make or convert rows."""
        named = [name for part in self.parts for name in (part.spec, part.options.get("convert", ""))]
        return [name for name in named if is_function(name)]

    @property
    def spec(self) -> str:
        """The names of all data."""
        return ", ".join(dict.fromkeys(part.spec for part in self.parts))


def open_rows(setup: RowSetup) -> DataSource:
    """Open the data of a setup.

    Raises:
        DataError: one of its parts cannot serve.
    """
    parts = [_open_part(part, setup) for part in setup.parts]
    return parts[0] if len(parts) == 1 else MixedSource(parts, setup.turns)


def _open_part(part: RowsPart, setup: RowSetup) -> DataSource:
    def opened(further: dict[str, int]) -> DataSource:
        options = part.options | further
        return open_source(
            part.spec,
            options=options,
            seed=setup.seed,
            base=Path(setup.base),
            labels_for=part.labels_for,
            row_limit_s=setup.row_limit_s,
        )

    if part.ladder is not None:
        return LadderSource(part.ladder, opened)
    source = opened({})
    if part.max_tokens and isinstance(source, FileSource):
        return source.shortened(TaskTokenizer.load(Path(setup.model)), part.max_tokens)
    return source


class MixedSource:
    """Rows of several data in turn. Each has its own order, as if it were alone."""

    def __init__(self, parts: Sequence[DataSource], turns: Sequence[int]) -> None:
        self._parts = parts
        self._turns = turns  # numbers of the parts in whose turn rows are taken, again and again
        ends = [self._end(part, source.rows_per_epoch) for part, source in enumerate(parts) if source.rows_per_epoch]
        self.rows_per_epoch: int | None = min(ends, default=None)  # places before the first row that comes again

    def _end(self, part: int, rows: int) -> int:
        """The place at which the rows of a part begin again."""
        places = [place for place, turn in enumerate(self._turns) if turn == part]
        cycles, rest = divmod(rows, len(places))
        return cycles * len(self._turns) + places[rest]

    def row(self, index: int) -> PromptRow:
        """The row at place `index` of the endless order."""
        level = level_of(index)
        cycle, at = divmod(at_level(index, -level), len(self._turns))
        part = self._turns[at]
        return self._parts[part].row(at_level(cycle * self._turns.count(part) + self._turns[:at].count(part), level))

    def describe(self) -> str:
        """Every part."""
        return "; ".join(part.describe() for part in self._parts)
