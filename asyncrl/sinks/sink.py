"""The protocol of sinks: a sink takes rows of metrics in their order, and continues from a stored position."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import msgspec

from asyncrl.errors import AsyncRLError

Row: TypeAlias = dict[str, Any]
"""One row of `metrics.jsonl`. Its `event` is `step`, `eval` or `weights`; rows of one event always have one order."""


class SinkError(AsyncRLError):
    """A sink that takes no rows now; it continues from its position later."""


class Position(msgspec.Struct):
    """The rows of a run that a sink has stored."""

    rows: dict[str, int] = {}  # rows that it has stored, by their event
    bytes: int = 0  # size of its file; 0 for sinks that write no file

    @property
    def total(self) -> int:
        """All rows that it has stored."""
        return sum(self.rows.values())


class MetricsSink(Protocol):
    """A tool that stores rows of metrics.

    Each row is stored once, although the process that calls a sink may be killed at any time. The caller stores the
    position after `sync`. At the next start `open` removes rows after that position, or counts them.
    """

    def open(self, position: Position | None) -> int:
        """Continue after a position; without one, begin.

        Returns:
            Number of rows that the sink has stored: the first ones of the run.
        """

    def append(self, rows: Sequence[Row]) -> None:
        """Take rows."""

    def sync(self) -> int:
        """Store all rows that were taken; returns the size in bytes of the file, 0 without a file."""

    def close(self) -> None:
        """Release what the sink has opened; also a sink that failed is closed."""


class SinkRun(NamedTuple):
    """The run whose rows a sink stores."""

    run: str
    root: Path  # its directory
    base: Path  # folder that relative paths of its config start from
    began_s: float  # when it began, as Unix time; `time_s` of a row counts from there
    settings: dict[str, Any]  # its config

    @property
    def id(self) -> str:
        """An id for tools that keep the runs of many directories. Two runs of one name began at different times."""
        return f"{self.run}-{int(self.began_s)}"


class SinkSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """The settings of one kind of sinks, with which they are made. `kind` names the class."""

    stores: ClassVar[bool] = True  # False: it shows the newest rows alone
    package: ClassVar[str] = ""  # that it needs; asyncrl has an extra of the name of the kind with the package

    @property
    def kind(self) -> str:
        """The name of the kind."""
        return str(self.__struct_config__.tag)

    def problem(self) -> str:
        """Return what the sink lacks on this machine; empty if it can be made."""
        if not self.package or importlib.util.find_spec(self.package) is not None:
            return ""
        wanted = f"pip install 'asyncrl[{self.kind}]'"
        return f'kind = "{self.kind}" needs the Python package {self.package}, which is not installed; run `{wanted}`'

    def sink(self, run: SinkRun) -> MetricsSink:
        """Make the sink of a run; it opens nothing yet."""
        raise NotImplementedError
