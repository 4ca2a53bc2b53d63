"""Rows of metrics, and names that `metrics.jsonl`, sinks, states and gates share. Older names are aliases."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from asyncrl.errors import UNREADABLE

T = TypeVar("T")

ALIASES = {
    "reward_mean": "reward/mean",
    "reward_std": "reward/std",
    "response_tokens_mean": "response_length/mean",
    "response_tokens_max": "response_length/max",
    "lag_mean_versions": "lag/mean",
    "tokens_per_s": "throughput/tokens_per_s",
    "wasted_token_share": "waste/share",
}
MAIN = ("reward/mean", "reward/std", "response_length/mean", "lag/mean", "throughput/tokens_per_s")  # in `run.history`


def name_of(field: str) -> str:
    """Return the name of a metric that may have an older name."""
    return ALIASES.get(field, field)


def named(figures: Mapping[str, T]) -> dict[str, T]:
    """Return metrics under their names."""
    return {name_of(field): value for field, value in figures.items()}


class MetricRow(dict[str, Any]):
    """A row of metrics under their names; a look-up by an older name finds the same value."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        super().__init__(named(row))

    def __missing__(self, field: str) -> Any:
        if (name := name_of(field)) in self:
            return self[name]
        raise KeyError(field)


def read_rows(path: Path, event: str) -> list[MetricRow]:
    """Read the rows of an event from the metrics of a run; empty before the first.

    Args:
        path: `metrics.jsonl` of the run.
        event: "step", "eval" or "weights".
    """
    rows: list[MetricRow] = []
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return rows
    for line in lines:
        with contextlib.suppress(*UNREADABLE):  # the last line may be incomplete
            row = msgspec.json.decode(line, type=dict[str, Any])
            if row.get("event") == event:
                rows.append(MetricRow(row))
    return rows
