"""The figures of rows, under the names that all sinks use."""

from __future__ import annotations

import math
from typing import NamedTuple

from asyncrl.sinks.sink import Row

_NAMES = {
    "reward_mean": "reward/mean",
    "reward_std": "reward/std",
    "response_tokens_mean": "response_length/mean",
    "response_tokens_max": "response_length/max",
    "lag_mean_versions": "lag/mean",
    "tokens_per_s": "throughput/tokens_per_s",
}
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
    for field, value in row.items():
        if field in _NO_FIGURES:
            continue
        parts = value if isinstance(value, dict) and field != "versions" else {"": value}
        for part, number in parts.items():
            if isinstance(number, int | float) and math.isfinite(number):
                figures[_name(prefix, "/".join(filter(None, (field, str(part)))), event)] = float(number)
    step = row["step"] if event == "step" else row.get("version", 0)
    return Point(event, int(step), float(row.get("time_s", 0.0)), figures)


def _name(prefix: str, field: str, event: str) -> str:
    if event == "step" and (field in _NAMES or "/" in field):
        return _NAMES.get(field, field)
    return f"{prefix}/{field}"
