"""The kind of sinks that write events of TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from asyncrl.sinks.sink import MetricsSink, SinkRun, SinkSettings


class TensorboardSettings(SinkSettings, tag="tensorboard"):
    """Events of TensorBoard, in one file."""

    package: ClassVar[str] = "tensorboard"

    # Folder of the folder RUN with the events; a relative path starts from the config's folder. Empty: `tensorboard` in
    # the run's directory.
    directory: str = ""

    def sink(self, run: SinkRun) -> MetricsSink:
        from asyncrl.sinks.tensorboard.sink import TensorboardSink

        given = run.base / Path(self.directory).expanduser() / run.run
        return TensorboardSink(given if self.directory else run.root / "tensorboard", run.began_s)
