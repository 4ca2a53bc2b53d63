"""Columns of the user's own: numbers for each token that a loss of theirs needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, TypeAlias

import numpy as np

from asyncrl.algorithms.named import AlgorithmError, Table, guarded, named, numbers
from asyncrl.algorithms.rows import TrainRow
from topics.wire import Float32Array

Column: TypeAlias = Callable[[TrainRow], Float32Array]
"""Numbers [T] of the tokens of a row."""

RESERVED = (
    "entropy",
    "hindsight",
    "observed",
    "penalty",
    "proximal",
    "reference",
    "second_moment",
    "teacher",
    "teacher_top",
    "values",
)
"""Columns that are filled here."""


def _of_user(found: Any) -> Column:
    """A function of a row."""
    if isinstance(found, type):
        raise TypeError("it is a class, expected a function of a row")
    given = guarded(found)

    @wraps(found)
    def column(row: TrainRow) -> Float32Array:
        values = guarded(numbers)(given(row), np.float32)
        what = f"trajectory {row.trajectory_id!r}: a column"
        if values.shape != row.tokens.shape:
            found = f"{what} of shape {values.shape} for {len(row.tokens)} tokens"
            raise AlgorithmError(f"{found}; it is one number for each")
        if not np.isfinite(values).all():
            place = int(np.flatnonzero(~np.isfinite(values))[0])
            raise AlgorithmError(f"{what} with {values[place]} at token {place}; each must be a finite number")
        return values

    return column


COLUMNS: Table[Column] = Table({}, _of_user)
"""Columns by their name in `learner.columns`; all are the user's own."""


def with_columns(rows: Sequence[TrainRow], columns: Mapping[str, str]) -> list[TrainRow]:
    """The rows with columns of the user's own.

    Args:
        columns: names in `COLUMNS`, by that of the column.

    Raises:
        AlgorithmError: one cannot be loaded, raises, or gives other than one finite number for each token.
    """
    made = {name: named(COLUMNS, function, "column") for name, function in columns.items()}
    if not made:
        return list(rows)
    return [replace(row, columns={**row.columns, **{name: of(row) for name, of in made.items()}}) for row in rows]
