"""The sink that writes a file. `open` cuts off the bytes after the stored position."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asyncrl.sinks.sink import Position, Row


class FileSink:
    """`MetricsSink` of one file, to which rows are appended; one line of JSON for each row."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, position: Position) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.truncate(position.bytes)
        return 0

    def append(self, rows: Sequence[Row]) -> None:
        with self.path.open("ab") as file:
            file.write(b"".join(map(self.encoded, rows)))

    def encoded(self, row: Row) -> bytes:
        """Return a row as the file has it."""
        return msgspec.json.encode(row) + b"\n"

    def sync(self) -> int:
        with self.path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def close(self) -> None:
        """Nothing stays open."""
