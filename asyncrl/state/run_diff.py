"""The differences of two runs: their settings, and their metrics at the same steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec

from asyncrl.config.settings import Config

_NAMES = ("run", "directory")  # differ in any two runs


class SettingDiff(msgspec.Struct):
    """A setting that two runs have with other values."""

    setting: str  # "learner.lr"
    first: Any
    second: Any


class MetricDiff(msgspec.Struct):
    """A metric at the last step that both runs have: means of the window up to it."""

    metric: str
    step: int
    first: float
    second: float


def setting_diffs(first: Config, second: Config) -> list[SettingDiff]:
    """Return the settings that differ, in the order of the tree."""
    ours, theirs = (dict(_leaves(msgspec.to_builtins(config))) for config in (first, second))
    names = [name for name in dict.fromkeys([*ours, *theirs]) if name not in _NAMES]
    diffs = [SettingDiff(name, ours.get(name), theirs.get(name)) for name in names]
    return [diff for diff in diffs if diff.first != diff.second]


def metric_diffs(
    first: Mapping[str, Mapping[int, float]], second: Mapping[str, Mapping[int, float]], window: int
) -> list[MetricDiff]:
    """Return the metrics that both runs have at some step.

    Args:
        first, second: finite values by step, by metric.
        window: steps of a mean, or as many as there are.
    """
    found = []
    for metric in first:
        if steps := sorted(first[metric].keys() & second.get(metric, {}).keys()):
            means = [fmean(values[metric][step] for step in steps[-window:]) for values in (first, second)]
            found.append(MetricDiff(metric, steps[-1], *means))
    return found


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a tree with their names; lists are values."""
    if not isinstance(value, Mapping) or not value:
        yield name, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{name}.{key}" if name else str(key))


def common_metrics(rows: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return the names of numbers that rows of all runs have, in the order of the first run."""
    names = [dict.fromkeys(name for row in run for name, value in row.items() if _is_number(value)) for run in rows]
    shared = [name for name in names[0] if all(name in others for others in names[1:])]
    return [name for name in shared if name not in ("step", "lineage", "time_s")]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
