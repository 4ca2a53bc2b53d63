"""Events of TensorBoard: one file of records, each with its length and checksums."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from asyncrl.sinks.figures import point_of
from asyncrl.sinks.file.sink import FileSink
from asyncrl.sinks.sink import Row

_VERSION = "brain.Event:2"  # of the format; each file begins with it


class TensorboardSink(FileSink):
    """`MetricsSink` of an event file: one event for each row, with its step and time."""

    def __init__(self, folder: Path, began_s: float) -> None:
        super().__init__(folder / f"events.out.tfevents.{int(began_s)}.asyncrl")
        self._began_s = began_s

    def encoded(self, rows: Sequence[Row], offset: int) -> bytes:
        events = [self._event(row) for row in rows]
        if not offset:
            events.insert(0, Event(wall_time=self._began_s, file_version=_VERSION))
        written = io.BytesIO()
        writer = RecordWriter(written)
        for event in events:
            writer.write(event.SerializeToString(deterministic=True))
        return written.getvalue()

    def _event(self, row: Row) -> Event:
        point = point_of(row)
        values = [Summary.Value(tag=name, simple_value=number) for name, number in point.figures.items()]
        return Event(wall_time=self._began_s + point.time_s, step=point.step, summary=Summary(value=values))
