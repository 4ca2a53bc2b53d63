"""Rows of `metrics.jsonl` on their way into one sink, from its stored position to the end of the file."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import msgspec

from asyncrl.errors import UNREADABLE
from asyncrl.sinks.samples import SamplesTail
from asyncrl.sinks.sink import MetricsSink, Position, Row, SamplesSink, SinkError

_ROWS = 256  # that a sink is given at once
_DECODER = msgspec.json.Decoder(Row)


class SinkFeed:
    """Gives each row of a file to a sink once; what has been given is stored in a file next to the run."""

    def __init__(self, name: str, sink: MetricsSink, metrics: Path) -> None:
        self.name = name
        self._sink, self._metrics = sink, metrics
        self._stored = metrics.parent / "sinks" / f"{name}.json"
        self._position = Position()
        self._offset = 0  # bytes of the metrics that were read
        self._left: dict[str, int] = {}  # rows after there that the sink has, by event
        self._samples = SamplesTail(metrics.parent / "samples.jsonl")

    @property
    def total(self) -> int:
        """Rows that the sink has."""
        return self._position.total

    def open(self) -> None:
        """Continue at the stored position.

        Raises:
            SinkError: the sink takes no rows now.
        """
        try:
            self._open()
        except Exception as error:
            raise SinkError(f"sink {self.name} does not open: {error}") from error

    def _open(self) -> None:
        position = self._read()
        held = self._sink.open(position)
        self._position = position or Position()
        if held != self._position.total:
            self._position.rows = self._first(held)
        self._offset, self._left = 0, dict(self._position.rows)
        self._samples.newest = dict(self._position.samples)
        self._store()

    def advance(self, end: int) -> int:
        """Give the sink further rows.

        Args:
            end: size of the metrics in bytes up to which rows are final.

        Returns:
            Number of rows that were given, of metrics and samples; 0 at the end.

        Raises:
            SinkError: the sink takes no rows now; it must be opened again.
        """
        try:
            return self._advance(end)
        except Exception as error:
            raise SinkError(f"sink {self.name} takes no rows: {error}") from error

    def _advance(self, end: int) -> int:
        rows, offset = self._next(end)
        if rows:
            self._sink.append(rows)
        samples = self._samples.read() if isinstance(self._sink, SamplesSink) and (rows or self.total) else []
        if samples and isinstance(self._sink, SamplesSink):
            self._sink.append_samples(samples)
            self._position.samples = dict(self._samples.newest)
            self._position.tables += len(samples)
        if not (rows or samples):
            return 0
        self._position.bytes = self._sink.sync()
        self._offset = offset
        for row in rows:
            event = str(row["event"])
            self._position.rows[event] = self._position.rows.get(event, 0) + 1
        self._store()
        return len(rows) + len(samples)

    def close(self) -> None:
        """Close the sink.

        Raises:
            SinkError: it failed.
        """
        try:
            self._sink.close()
        except Exception as error:
            raise SinkError(f"sink {self.name} does not close: {error}") from error

    def _next(self, end: int) -> tuple[list[Row], int]:
        """The rows that come next, and the offset after them; rows that the sink has are passed over."""
        rows: list[Row] = []
        with self._metrics.open("rb") as file:
            file.seek(self._offset)
            while len(rows) < _ROWS and file.tell() < end:
                row = _DECODER.decode(file.readline())
                event = str(row["event"])
                if self._left.get(event):
                    self._left[event] -= 1
                    self._offset = file.tell()
                else:
                    rows.append(row)
            return rows, file.tell()

    def _first(self, count: int) -> dict[str, int]:
        """The first rows of the metrics, counted by event."""
        found: dict[str, int] = {}
        with self._metrics.open("rb") as file:
            for row in map(_DECODER.decode, islice(file, count)):
                found[str(row["event"])] = found.get(str(row["event"]), 0) + 1
        return found

    def _read(self) -> Position | None:
        try:
            return msgspec.json.decode(self._stored.read_bytes(), type=Position)
        except FileNotFoundError:
            return None
        except UNREADABLE as error:
            raise SinkError(f"{self._stored} holds no position of a sink: {error}; bring it back") from error

    def _store(self) -> None:
        self._stored.parent.mkdir(parents=True, exist_ok=True)
        new = self._stored.with_suffix(".new")
        with new.open("wb") as file:
            file.write(msgspec.json.encode(self._position))
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._stored)
