"""The names of metrics, which are the same in `metrics.jsonl`, sinks, states and gates. Older names are aliases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

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
