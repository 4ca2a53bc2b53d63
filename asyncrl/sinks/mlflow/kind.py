"""The kind of sinks that write a run of MLflow."""

from __future__ import annotations

from typing import ClassVar

from asyncrl.sinks.sink import MetricsSink, SinkRun, SinkSettings


class MlflowSettings(SinkSettings, tag="mlflow"):
    """A run of MLflow, in a database or on a tracking server."""

    package: ClassVar[str] = "mlflow"

    experiment: str = "asyncrl"  # Experiment of the run.
    # Tracking server or database, such as `http://127.0.0.1:5000` or `sqlite:////data/mlflow.db`. Empty: `mlflow.db` in
    # the run's directory.
    uri: str = ""

    def problem(self) -> str:
        if self.uri.startswith("file:") or (self.uri and "://" not in self.uri):
            return f'uri = "{self.uri}": MLflow stores a repeated row twice in files; name a server or a database'
        return super().problem()

    def sink(self, run: SinkRun) -> MetricsSink:
        from asyncrl.sinks.mlflow.sink import MlflowSink

        return MlflowSink(run, self.experiment, self.uri or f"sqlite:///{run.root / 'mlflow.db'}")
