"""Prompts of a task: rows of a file, or rows made by a rule, in a seeded order without end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncrl import environment_names
from asyncrl.data import file_source
from asyncrl.data.curriculum import Ladder, LadderSource, at_level, level_of
from asyncrl.data.file_source import FileSource, Wanted
from asyncrl.data.procedural import RULES
from asyncrl.data.row_fields import WARMUP
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.data.user_source import open_function
from asyncrl.environments import kinds as environments
from asyncrl.environments.protocol import DataError, DataSource
from asyncrl.functions import FORMS, is_function
from topics.prompts import PromptRow


class SourceKind(NamedTuple):
    """A form in which `task.source` names data."""

    forms: tuple[str, ...]  # as messages name them
    matches: Callable[[str], bool]
    open: Callable[[Wanted], DataSource]


def _open_environment(wanted: Wanted) -> DataSource:
    kind, _, name = wanted.spec.partition(":")
    return environments.make(kind, name, wanted.options, wanted.seed, wanted.base)


KINDS = (
    SourceKind(file_source.FORMS, file_source.is_file, file_source.open_file),
    SourceKind(tuple(RULES), RULES.__contains__, lambda wanted: RULES[wanted.spec](wanted.options, wanted.seed)),
    SourceKind(environment_names.FORMS, environment_names.is_environment, _open_environment),
    SourceKind(FORMS, is_function, open_function),
)
"""The kinds of data: at most one matches a text."""


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
    wanted = Wanted(spec, options, seed, base, labels_for, row_limit_s)
    for kind in KINDS:
        if kind.matches(spec):
            return kind.open(wanted)
    known = ", ".join(form for kind in KINDS for form in kind.forms)
    folder = spec.rpartition("/")[2]
    get = f"hf download {spec} --repo-type dataset --local-dir {folder}, then name a file such as {folder}/rows.parquet"
    hub = f"; fetch a data set of a hub first: {get}" if spec.count("/") == 1 else ""
    raise DataError(f"unknown data {spec!r}; known are {known}{hub}")


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
