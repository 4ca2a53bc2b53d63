"""The kind of sinks that write a run of Trackio."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from asyncrl.sinks.sink import MetricsSink, SinkRun, SinkSettings


class TrackioSettings(SinkSettings, tag="trackio"):
    """A run of Trackio, in a database of one project."""

    package: ClassVar[str] = "trackio"

    project: str = "asyncrl"  # Project of the run.
    # Folder of the database, which `TRACKIO_DIR` names for `trackio show`; a relative path starts from the config's
    # folder. Empty: `trackio` in the run's directory.
    directory: str = ""

    def sink(self, run: SinkRun) -> MetricsSink:
        from asyncrl.sinks.trackio.sink import TrackioSink

        folder = run.base / Path(self.directory).expanduser() if self.directory else run.root / "trackio"
        return TrackioSink(run, self.project, folder)
