"""Metrics of a run in a database of Trackio, by its package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from trackio import sqlite_storage, utils
from trackio.sqlite_storage import SQLiteStorage

from asyncrl.sinks.figures import point_of
from asyncrl.sinks.sink import Position, Row, SinkRun


class TrackioSink:
    """`MetricsSink` of one run in Trackio.

    Each row has the id `EVENT-NUMBER`, which the database takes once. So rows that a killed process has written after
    its position are written again without any effect. Trackio's own `log` gives each call a new id.
    """

    def __init__(self, run: SinkRun, project: str, folder: Path) -> None:
        self._run, self._project, self._folder = run, project, folder
        self._counts: Counter[str] = Counter()  # rows that were taken, by event

    def open(self, position: Position | None) -> int:
        self._use_folder()
        has_rows = SQLiteStorage.get_project_db_path(self._project).exists()
        self._counts = Counter(position.rows if position is not None and has_rows else {})
        return self._counts.total()

    def append(self, rows: Sequence[Row]) -> None:
        self._use_folder()
        points = [point_of(row) for row in rows]
        ids = []
        for point in points:
            ids.append(f"{self._run.id}-{point.event}-{self._counts[point.event]}")
            self._counts[point.event] += 1
        times = [datetime.fromtimestamp(self._run.began_s + point.time_s, UTC).isoformat() for point in points]
        SQLiteStorage.bulk_log(
            self._project,
            self._run.run,
            [point.figures for point in points],
            steps=[point.step for point in points],
            timestamps=times,
            config=self._run.settings,
            log_ids=ids,
            run_id=self._run.id,
        )

    def _use_folder(self) -> None:
        """Name the folder of the database: Trackio keeps one for its process, and takes no argument for it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        utils.TRACKIO_DIR = sqlite_storage.TRACKIO_DIR = self._folder

    def sync(self) -> int:
        """Rows are in the database once it has taken them."""
        return 0

    def close(self) -> None:
        """Nothing stays open."""
