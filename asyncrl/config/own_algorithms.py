"""The user's own losses, advantages and filters: where the settings name one, it is found and loaded."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.filters import FILTERS, reason_of
from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.named import AlgorithmError
from asyncrl.algorithms.own_columns import COLUMNS
from asyncrl.config.finding import Finding
from asyncrl.config.settings import Config
from asyncrl.config.staged import all_filters
from asyncrl.config.task_settings import StageSettings


class Named(NamedTuple):
    """A place of the settings that names an algorithm."""

    key: str
    name: str
    table: Mapping[str, object]
    put: Callable[[str], None]
    default: str
    stage: str = ""


def named_algorithms(config: Config) -> Iterator[Named]:
    """Every loss, advantage and filter that the settings name."""

    learner = config.learner
    yield Named("learner.loss", learner.loss, LOSSES, partial(setattr, learner, "loss"), "decoupled")
    tables: dict[str, Any] = {"learner": learner, **{f"tasks.{name}": task for name, task in config.tasks.items()}}
    for key, table in tables.items():
        if table.advantage is not None:
            yield Named(f"{key}.advantage", table.advantage, ADVANTAGES, partial(setattr, table, "advantage"), "grpo")
    for place, name in enumerate(learner.filters):
        yield Named("learner.filters", name, FILTERS, partial(learner.filters.__setitem__, place), "zero_variance")
    for name, function in learner.columns.items():
        yield Named(f"learner.columns.{name}", function, COLUMNS, partial(_put_column, learner.columns, name), "")
    for name, stage in config.stages.items():
        yield from _named_in(name, stage)


def _put_column(columns: dict[str, str], name: str, function: str) -> None:
    """Let a function fill a column; "" leaves the column out."""
    columns.pop(name)
    if function:
        columns[name] = function


def _named_in(name: str, stage: StageSettings) -> Iterator[Named]:
    key = f"stages.{name}"
    if stage.loss is not None:
        yield Named(f"{key}.loss", stage.loss, LOSSES, partial(setattr, stage, "loss"), "decoupled", name)
    if stage.advantage is not None:
        yield Named(f"{key}.advantage", stage.advantage, ADVANTAGES, partial(setattr, stage, "advantage"), "grpo", name)
    filters = stage.filters or []
    for place, named in enumerate(filters):
        yield Named(f"{key}.filters", named, FILTERS, partial(filters.__setitem__, place), "zero_variance", name)


def load_own_algorithms(config: Config, base: Path) -> list[Finding]:
    """Make the paths of the user's own functions absolute, in the settings themselves, and load the functions.

    Returns:
        What cannot be loaded; there the settings have a default now.
    """
    findings = []
    for one in [one for one in named_algorithms(config) if ":" in one.name]:
        name = absolute(one.name, base)
        one.put(name)
        try:
            one.table[name]
        except AlgorithmError as error:
            findings.append(Finding((one.key,), str(error)))
            one.put(one.default)
    reasons = Counter(map(reason_of, all_filters(config)))
    for reason in [reason for reason, count in reasons.items() if count > 1]:
        message = f'two filters are called "{reason}", which is the reason that a dropped group gets; rename one'
        findings.append(Finding(("learner.filters",), message))
    return findings


def absolute(name: str, base: Path) -> str:
    """The name of a user's function with the absolute path of its file; a module's is as it was."""
    where, _, function = name.rpartition(":")
    return f"{os.path.abspath(base / where)}:{function}" if where.endswith(".py") else name
