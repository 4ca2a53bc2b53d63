"""The kind of sinks that write lines of JSON."""

from __future__ import annotations

from pathlib import Path

from asyncrl.sinks.sink import MetricsSink, SinkRun, SinkSettings


class FileSettings(SinkSettings, tag="file"):
    """A second copy of `metrics.jsonl`, for example on a disk that others read."""

    directory: str = "metrics"  # Folder of the file `RUN.jsonl`; a relative path starts from the config's folder.

    def sink(self, run: SinkRun) -> MetricsSink:
        from asyncrl.sinks.file.sink import FileSink

        return FileSink(run.base / Path(self.directory).expanduser() / f"{run.run}.jsonl")
