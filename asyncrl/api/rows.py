"""Results as rows, for tables and plots."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from asyncrl.errors import UNREADABLE, AsyncRLError
from asyncrl.telemetry.metric_names import MetricRow

T = TypeVar("T")


class Rows(list[T]):
    """A list of rows: dictionaries or structs."""

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with one row for each.

        Raises:
            AsyncRLError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise AsyncRLError("pandas is not installed; install it: pip install pandas") from error
        return pandas.DataFrame([msgspec.to_builtins(row) for row in self])


def metric_rows(path: Path, event: str) -> Rows[MetricRow]:
    """Read the rows of an event from the metrics of a run; empty before the first.

    Args:
        path: `metrics.jsonl` of the run.
        event: "step", "eval" or "weights".
    """
    rows: Rows[MetricRow] = Rows()
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
