"""The protocol of sinks: a sink takes rows of metrics in their order, and continues from a stored position."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec

from asyncrl.errors import AsyncRLError

Row: TypeAlias = dict[str, Any]
"""One row of `metrics.jsonl`. Its `event` is `step`, `eval` or `weights`; rows of one event always have one order."""


class SamplesRow(msgspec.Struct):
    """One row of `samples.jsonl`."""

    event: str
    step: int  # of the batch, or version that was evaluated
    sequence: int  # rises with the rows of an event
    samples: list[dict[str, Any]]


class SinkError(AsyncRLError):
    """A sink that takes no rows now; it continues from its position later."""


class Position(msgspec.Struct):
    """The rows of a run that a sink has stored."""

    rows: dict[str, int] = {}  # rows that it has stored, by their event
    bytes: int = 0  # size of its file; 0 for sinks that write no file
    samples: dict[str, int] = {}  # newest row of `samples.jsonl` that it has stored, by event: its `sequence`
    tables: int = 0  # rows of samples that it has stored

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


@runtime_checkable
class SamplesSink(MetricsSink, Protocol):
    """A tool that also stores samples."""

    def append_samples(self, rows: Sequence[SamplesRow]) -> None:
        """Take samples, after the rows of metrics that the recorder wrote before them."""


class Span(NamedTuple):
    """A span of a trajectory."""

    name: str
    trace: bytes  # [16]
    id: bytes  # [8]
    parent: bytes  # [8]; empty for the root of a trace
    begin_ns: int  # Unix time
    end_ns: int
    attributes: Mapping[str, str | int | float]
    error: str = ""  # why it failed


class TraceSink(Protocol):
    """A tool that stores traces of trajectories."""

    def send(self, spans: Sequence[Span]) -> None:
        """Store spans.

        Raises:
            SinkError: it does not take them now.
        """


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
    traces: ClassVar[bool] = False  # True: it takes traces of trajectories (`trace_sink`), else rows (`sink`)
    package: ClassVar[str] = ""  # that it needs; asyncrl has an extra of the name of the kind with the package

    @property
    def kind(self) -> str:
        """The name of the kind."""
        return str(self.__struct_config__.tag)

    @property
    def traced_share(self) -> float:
        """The share of trajectories whose traces it takes; 0 for sinks that take rows."""
        return 0.0

    def problem(self) -> str:
        """Return what the sink lacks on this machine; empty if it can be made."""
        if not self.package or _is_installed(self.package):
            return ""
        wanted = f"pip install 'asyncrl[{self.kind}]'"
        return f'kind = "{self.kind}" needs the Python package {self.package}, which is not installed; run `{wanted}`'

    def sink(self, run: SinkRun) -> MetricsSink:
        """Make the sink of a run; it opens nothing yet."""
        raise NotImplementedError

    def trace_sink(self, run: str) -> TraceSink:
        """Make the sink for traces of a run; it opens nothing yet."""
        raise NotImplementedError


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False
