"""Results as rows, for tables and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from asyncrl.errors import AsyncRLError
from asyncrl.telemetry.metric_names import MetricRow, read_rows

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
    """Read the rows of an event from the metrics of a run; see `read_rows`."""
    return Rows(read_rows(path, event))
