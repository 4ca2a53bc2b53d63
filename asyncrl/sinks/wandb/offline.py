"""The file of an offline run of Weights & Biases, which `wandb sync` uploads.

The package `wandb` writes such files too, in a process that keeps rows in memory and loses them when it is killed, and
begins another file at each start. This file has each row once the position is stored.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from asyncrl.sinks.figures import point_of
from asyncrl.sinks.file.sink import FileSink
from asyncrl.sinks.sink import Position, Row, SamplesRow, SinkRun

# The log format of LevelDB, without its mask of checksums: blocks with fragments, each after a header.
_BLOCK = 32768
_FILE_HEADER = b":W&B\xe1\xbe\x00"
_HEADER = 7  # bytes: 4 of the checksum, 2 of the length, 1 of the kind
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_COLUMNS = ("name", "reward", "prompt", "completion", "label", "tokens", "truncated")  # fields of a sample
_MIN_CONSUMER = "0.70.0"  # as the package writes it


class OfflineSink(FileSink):
    """`MetricsSink` of the file `wandb/offline-run-TIME-ID/run-ID.wandb` in the directory of a run."""

    def __init__(self, run: SinkRun, project: str, entity: str) -> None:
        began = time.strftime("%Y%m%d_%H%M%S", time.gmtime(run.began_s))
        self._id, self._run, self._project, self._entity = run.id, run, project, entity
        self._tables = 0  # of samples, that are in the file
        super().__init__(run.root / "wandb" / f"offline-run-{began}-{self._id}" / f"run-{self._id}.wandb")

    def open(self, position: Position | None) -> int:
        self._tables = position.tables if position is not None else 0
        return super().open(position)

    def append_samples(self, rows: Sequence[SamplesRow]) -> None:
        """See `SamplesSink`: each row becomes a table, in a file that the run names."""
        with self.path.open("ab") as file:
            for row in rows:
                for record in self._table_records(row):
                    file.write(b"".join(_fragments(record.SerializeToString(deterministic=True), file.tell())))
                self._tables += 1

    def _table_records(self, row: SamplesRow) -> Iterator[Record]:
        cells = [[_cell(sample.get(column)) for column in _COLUMNS] for sample in row.samples]
        content = msgspec.json.encode({"columns": _COLUMNS, "data": cells})
        digest = hashlib.sha256(content).hexdigest()
        path = Path("media") / "table" / f"samples_{row.event}_{row.step}_{digest[:20]}.table.json"
        target = self.path.parent / "files" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        table = {"_type": "table-file", "path": str(path), "sha256": digest, "size": len(content)}
        table |= {"ncols": len(_COLUMNS), "nrows": len(cells)}
        name = "samples" if row.event == "step" else f"{row.event}/samples"
        number = self.total + self._tables
        yield Record(files={"files": [{"path": str(path), "policy": "NOW", "type": "MEDIA"}]})
        items = _items({name: table, "step": row.step, "_step": number})
        yield Record(history={"item": items, "step": {"num": number}})

    def encoded(self, rows: Sequence[Row], offset: int) -> bytes:
        begin = [] if offset else self._begin()
        written = [
            record
            for number, row in enumerate(rows, self.total + self._tables)
            for record in self._records(number, row)
        ]
        content = b"" if offset else _FILE_HEADER
        for record in (*begin, *written):
            content += b"".join(_fragments(record.SerializeToString(deterministic=True), offset + len(content)))
        return content

    def close(self) -> None:
        """Write that the run has ended; `open` removes this again, as it comes after the position."""
        with self.path.open("ab") as file:
            ended = Record(exit={"exit_code": 0})
            file.write(b"".join(_fragments(ended.SerializeToString(), file.tell())))

    def _begin(self) -> list[Record]:
        settings = [
            {"key": name, "value_json": msgspec.json.encode(value).decode()}
            for name, value in self._run.settings.items()
        ]
        began: dict[str, Any] = {"seconds": int(self._run.began_s)}
        names = {"run_id": self._id, "display_name": self._run.run, "project": self._project, "entity": self._entity}
        return [
            Record(header={"version_info": {"producer": wandb.__version__, "min_consumer": _MIN_CONSUMER}}),
            Record(run={**names, "start_time": began, "config": {"update": settings}}),
            Record(metric={"name": "step", "options": {"defined": True}}),
            Record(metric={"glob_name": "*", "step_metric": "step", "options": {"step_sync": True, "defined": True}}),
        ]

    def _records(self, number: int, row: Row) -> Iterator[Record]:
        point = point_of(row)
        own = {"_step": number, "_runtime": point.time_s, "_timestamp": self._run.began_s + point.time_s}
        values = point.figures | own | {"step": point.step}
        items = _items(values)
        yield Record(summary={"update": items})
        yield Record(history={"item": items, "step": {"num": number}})


def _items(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"nested_key": [name], "value_json": msgspec.json.encode(value).decode()} for name, value in values.items()]


def _cell(value: Any) -> Any:
    """Return a value as a cell of a table, which has one type in a column: texts, numbers and truth values."""
    return value if value is None or isinstance(value, str | int | float) else msgspec.json.encode(value).decode()


def _fragments(record: bytes, offset: int) -> Iterator[bytes]:
    """Return a record as it is written from a byte of the file on."""
    first = True
    while True:
        room = _BLOCK - offset % _BLOCK
        if room < _HEADER:  # too little for a header: the rest of the block is zero
            yield bytes(room)
            offset += room
            continue
        part, record = record[: room - _HEADER], record[room - _HEADER :]
        kind = (_FIRST if record else _FULL) if first else (_MIDDLE if record else _LAST)
        checksum = zlib.crc32(bytes([kind]) + part)
        yield checksum.to_bytes(4, "little") + len(part).to_bytes(2, "little") + bytes([kind]) + part
        offset += _HEADER + len(part)
        first = False
        if not record:
            return
