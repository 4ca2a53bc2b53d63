"""The sink that writes a file. `open` cuts off the bytes after the stored position."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asyncrl.sinks.sink import Position, Row, SinkError


class FileSink:
    """`MetricsSink` of one file, to which rows are appended; one line of JSON for each row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.total = 0  # rows that it has taken

    def open(self, position: Position | None) -> int:
        if position is None and self.path.exists() and self.path.stat().st_size:
            raise SinkError(f"{self.path} exists and has no rows of this run; move it, or name another place")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        position = position or Position()
        with self.path.open("ab") as file:
            if file.tell() < position.bytes:
                found = f"{self.path} has {file.tell()} bytes, expected at least {position.bytes}"
                raise SinkError(f"{found}: it was cut; bring it back, or remove it and its position in RUN/sinks")
            file.truncate(position.bytes)
        self.total = position.total
        return self.total

    def append(self, rows: Sequence[Row]) -> None:
        with self.path.open("ab") as file:
            file.write(self.encoded(rows, file.tell()))
        self.total += len(rows)

    def encoded(self, rows: Sequence[Row], _offset: int) -> bytes:
        """Return rows as the file has them from a byte on."""
        return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)

    def sync(self) -> int:
        with self.path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def close(self) -> None:
        """Nothing stays open."""
