"""Prompts of a task: rows of a file, or rows made by a rule, in a seeded order without end."""

from __future__ import annotations

import math
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from asyncrl.data import procedural
from asyncrl.data.curriculum import Ladder, LadderSource, at_level, level_of
from asyncrl.data.messages import has_answer, message_problem, plain_type
from asyncrl.data.protocol import DataError, DataSource, check_options
from asyncrl.data.user_source import UserSource, call_source, is_function, load_data_function, source_in_time
from asyncrl.errors import last_lines
from topics.prompts import PromptRow

_SHOWN_PROBLEMS = 5
_MOST_ROWS = 4_000_000  # of an iterator of the user's, which might have no end
_WARMUP = "the warm-up"
_MESSAGES = "messages"  # usual key of a conversation: a row without a prompt may have it
_SLICE = re.compile(r"(?P<path>.*)@\[(?P<bounds>[^\]]*)\]")
_BOUNDS = re.compile(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*")


def label_reader(*, graded: bool, warmup_steps: int) -> str:
    """Return what reads the label of each row, so that a row without one is an error; empty where nothing does.

    Args:
        graded: whether the reward reads it.
    """
    return "the reward" if graded else _WARMUP if warmup_steps else ""


def open_source(
    spec: str, *, options: dict[str, Any], seed: int, base: Path, labels_for: str = "", row_limit_s: float = 300.0
) -> DataSource:
    """Open the data that `spec` names.

    Args:
        spec: `file.jsonl` or `file.parquet`, each with an optional slice such as `@[0:100]` or `@[-50:]`; `reverse`;
            `sum`; `reasoning-gym:NAME`; or a user's `path/to/file.py:function` or `package.module:function`.
        options: for files `prompt_key`, `label_key`, `metadata_key`, `tools_key` and `convert`, a user's function of a
            row; for rules and functions what they take.
        seed: of the order, and of made rows. For held-out data give a file another slice, and a rule another seed:
            rules draw by a hash of seed and place, so two seeds give unrelated draws. They can then meet by chance
            only, one held-out prompt with probability of about (rows trained on) / (prompts there are).
        labels_for: the reader of labels, as by `label_reader`.
        row_limit_s: seconds that a user's function may take for each row that it lists.

    Raises:
        DataError: states what is wrong with spec, options or file.
    """
    match = _SLICE.fullmatch(spec)
    path = match["path"] if match else spec
    if path.endswith((".jsonl", ".parquet")):
        keys = _Keys(**check_options(spec, options, _Keys.__struct_fields__))
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
    kind, _, name = spec.partition(":")
    if kind == "reasoning-gym":
        return procedural.ReasoningGymSource(name, options, seed)
    functions = ("FILE.py:FUNCTION", "MODULE:FUNCTION")
    known = ", ".join(["FILE.jsonl", "FILE.parquet", *procedural.RULES, "reasoning-gym:NAME", *functions])
    raise DataError(f"unknown data {spec!r}; known are {known}")


def _user_source(spec: str, found: Any, row_came: Callable[[], None], *, seed: int, labels_for: str) -> DataSource:
    def encode(value: Any) -> bytes:
        value = msgspec.structs.asdict(value) if isinstance(value, PromptRow) else value
        return _encode_row(value, _Keys(), labels_for)

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

    def __init__(self, rows: Sequence[bytes], *, seed: int, name: str) -> None:
        self.rows_per_epoch: int | None = len(rows)
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
        return f"{self._name}: {self._rows} rows"


class RowsPart(msgspec.Struct):
    """The data of one task. The fields are arguments of `open_source`."""

    spec: str
    options: dict[str, Any] = {}
    labels_for: str = ""
    ladder: Ladder | None = None  # its difficulty, where that rises


class RowSetup(msgspec.Struct):
    """The data whose rows are made."""

    parts: list[RowsPart]
    turns: list[int]  # numbers of the parts in whose turn rows are taken, again and again
    seed: int
    base: str
    row_limit_s: float = 300.0  # that making one row may take
    open_limit_s: float = 600.0  # that opening may take
    longest: int = 0  # so many of the longest rows of a file are named when it is open

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

    return opened({}) if part.ladder is None else LadderSource(part.ladder, opened)


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


class _Keys(msgspec.Struct):
    prompt_key: str = "prompt"
    label_key: str = "label"
    metadata_key: str = "metadata"
    tools_key: str = "tools"
    convert: str = ""  # user's function of a row


def read_rows(
    path: Path, *, bounds: str, keys: _Keys, labels_for: str, convert: Callable[[Any], Any] | None = None
) -> list[bytes]:
    """Read the rows of a JSONL or Parquet file that `bounds`, such as `10:-10`, selects.

    Args:
        convert: makes each row of the file one of the task's; None leaves it out.

    Returns:
        Each row as MessagePack of a `PromptRow`.

    Raises:
        DataError: with up to five of the file's problems.
    """
    selected = _BOUNDS.fullmatch(bounds)
    if selected is None:
        raise DataError(f"{path.name}: bad slice @[{bounds}]; write @[FROM:TO], each a whole number or left out")
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    read = _read_jsonl if path.suffix == ".jsonl" else _read_parquet
    rows: list[bytes] = []
    problems: list[str] = []
    left_out = 0
    for place, value in read(path, slice(*(int(text) if text else None for text in selected.groups())), keys):
        try:
            found = msgspec.json.decode(value) if isinstance(value, bytes) else value
            if convert is not None and (found := _converted(convert, found)) is None:
                left_out += 1
                continue
            rows.append(_encode_row(found, keys, labels_for))
        except (DataError, ValueError, OverflowError, TypeError) as error:
            problems.append(f"{place}: {error}")
    if problems:
        more = len(problems) - _SHOWN_PROBLEMS
        tail = [f"... and {more} more"] if more > 0 else []
        raise DataError("\n  ".join([f"{path}: bad rows: {len(problems)}", *problems[:_SHOWN_PROBLEMS], *tail]))
    if not rows:
        if left_out:
            raise DataError(f"{path}: the function of the option convert leaves out all {left_out} rows")
        raise DataError(f"{path}: slice @[{bounds}] selects no row" if bounds != ":" else f"{path}: the file is empty")
    return rows


def _converted(convert: Callable[[Any], Any], row: Any) -> Any:
    try:
        found = convert(row)
    except Exception as error:  # anything may happen in a user's function
        raise DataError(f"the function of the option convert raises\n{last_lines(error)}") from error
    return msgspec.structs.asdict(found) if isinstance(found, PromptRow) else found


def _read_jsonl(path: Path, selected: slice, keys: _Keys) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as file:
        if file.read(len(BOM_UTF8)) != BOM_UTF8:
            file.seek(0)
        lines = [(number, line) for number, line in enumerate(file, 1) if not line.isspace()]
    return ((f"line {number}", line) for number, line in lines[selected])


def _read_parquet(path: Path, selected: slice, keys: _Keys) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow  # takes 50 MB, which readers of JSONL need not pay
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from error
    with file:
        names = file.schema_arrow.names
        if keys.prompt_key not in names and _MESSAGES in names:
            keys = msgspec.structs.replace(keys, prompt_key=_MESSAGES)
        if keys.prompt_key not in names and not keys.convert:
            raise DataError(f"{path}: no column {keys.prompt_key!r}; its columns are {', '.join(names)}")
        columns = [name for name in names if keys.convert or name in msgspec.structs.astuple(keys)]
        table = file.read(columns=columns)
    first, last, _ = selected.indices(table.num_rows)
    numbers = range(first, last)
    rows = (row for batch in table.slice(first, len(numbers)).to_batches() for row in batch.to_pylist())
    return ((f"row {number}", row) for number, row in zip(numbers, rows, strict=True))


def _encode_row(value: Any, keys: _Keys, labels_for: str) -> bytes:
    if not isinstance(value, dict):
        raise DataError(f"expected an object with the key {keys.prompt_key!r}, found {plain_type(value)}")
    if keys.prompt_key not in value and _MESSAGES in value:
        keys = msgspec.structs.replace(keys, prompt_key=_MESSAGES)
    prompt, label, metadata = (value.get(key) for key in (keys.prompt_key, keys.label_key, keys.metadata_key))
    found = ", ".join(map(repr, value)) or "no key"
    if keys.prompt_key not in value:
        raise DataError(f"no prompt under {keys.prompt_key!r}; found {found}")
    if not isinstance(prompt, str | list) or not prompt:
        empty = "empty" if prompt in ("", []) else plain_type(prompt)
        raise DataError(f"the prompt under {keys.prompt_key!r} is {empty}; expected text or a list of chat messages")
    problem = message_problem(prompt) if isinstance(prompt, list) else ""
    if problem:
        raise DataError(problem)
    if isinstance(label, float) and math.isnan(label):
        label = None  # so tables hold a value that is missing
    if label is None and labels_for and not (labels_for == _WARMUP and isinstance(prompt, list) and has_answer(prompt)):
        raise DataError(f"{labels_for} needs a label and there is none under {keys.label_key!r}; found {found}")
    if not isinstance(metadata, dict | None):
        raise DataError(f"{keys.metadata_key!r} is {plain_type(metadata)}; expected an object")
    if value.get(keys.tools_key) is not None:
        metadata = {**(metadata or {}), "tools": _tools(value[keys.tools_key], keys.tools_key)}
    return msgspec.msgpack.encode(PromptRow(prompt, label, metadata or {}))


def _tools(value: Any, key: str) -> list[dict[str, Any]]:
    """Tools that a chat template describes: a list of objects, or its JSON."""
    try:
        return msgspec.convert(msgspec.json.decode(value) if isinstance(value, str) else value, list[dict[str, Any]])
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise DataError(f"the tools under {key!r} are no list of objects, nor the JSON of one: {error}") from error
