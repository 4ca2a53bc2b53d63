"""The figures of rows, under the names that all sinks use."""

from __future__ import annotations

import math
from typing import NamedTuple

from asyncrl.sinks.sink import Row
from asyncrl.telemetry.metric_names import name_of, named

_PREFIXES = {"step": "train", "eval": "eval", "weights": "weights"}
_NO_FIGURES = ("event", "step", "version", "time_s", "lineage")


class Point(NamedTuple):
    """The numbers of one row."""

    event: str
    step: int  # of a step; the version that an evaluation or a published version has
    time_s: float  # since the run began
    figures: dict[str, float]  # by name, such as `reward/mean`


def point_of(row: Row) -> Point:
    """Return the numbers of a row."""
    event = str(row["event"])
    prefix = "/".join(filter(None, (_PREFIXES.get(event, event), row.get("set"))))
    figures: dict[str, float] = {}
    for field, value in named(row).items():
        if field in _NO_FIGURES:
            continue
        parts = value if isinstance(value, dict) and field != "versions" else {"": value}
        for part, number in parts.items():
            if isinstance(number, int | float) and math.isfinite(number):
                figures[_name(prefix, "/".join(filter(None, (field, str(part)))), event)] = float(number)
    step = row["step"] if event == "step" else row.get("version", 0)
    return Point(event, int(step), float(row.get("time_s", 0.0)), figures)


def step_figure(name: str) -> str:
    """Return the name of a figure of a step, for a name with or without its prefix, or an older one."""
    return _name(_PREFIXES["step"], name_of(name), "step")


def _name(prefix: str, field: str, event: str) -> str:
    return field if event == "step" and "/" in field else f"{prefix}/{field}"
