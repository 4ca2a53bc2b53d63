"""Metrics of a run in MLflow, by its client."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from asyncrl.sinks.figures import point_of
from asyncrl.sinks.sink import Position, Row, SinkError, SinkRun

_RUN_ID = "asyncrl.run_id"  # tag by which a restart finds the run
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
_MOST_METRICS, _MOST_PARAMS, _MOST_CHARS = 1000, 100, 500  # of one call, and of a parameter: limits of MLflow


class MlflowSink:
    """`MetricsSink` of one run in MLflow.

    A database of MLflow takes each combination of metric, time, step and value once. So rows that a killed process has
    written after its position are written again without any effect.
    """

    def __init__(self, run: SinkRun, experiment: str, uri: str) -> None:
        self._run, self._experiment, self._uri = run, experiment, uri
        self._client: MlflowClient | None = None
        self._id = ""  # of the run in MLflow

    def open(self, position: Position | None) -> int:
        self._client = MlflowClient(self._uri)
        query = f"tags.`{_RUN_ID}` = '{self._run.id}'"
        experiment = self._experiment_id(self._client)
        found = self._client.search_runs([experiment], query, max_results=1)
        self._id = found[0].info.run_id if found else self._begin(self._client, experiment)
        self._client.update_run(self._id, status="RUNNING")
        return position.total if position is not None and found else 0

    def _experiment_id(self, client: MlflowClient) -> str:
        known = client.get_experiment_by_name(self._experiment)
        if known is not None:
            return str(known.experiment_id)
        try:
            return str(client.create_experiment(self._experiment))
        except MlflowException:  # another run has created it since
            return str(client.get_experiment_by_name(self._experiment).experiment_id)

    def _begin(self, client: MlflowClient, experiment: str) -> str:
        began_ms = int(1000 * self._run.began_s)
        tags = {_RUN_ID: self._run.id}
        made = client.create_run(experiment, began_ms, tags=tags, run_name=self._run.run)
        texts = {name: str(value)[:_MOST_CHARS] for name, value in self._run.settings.items()}
        params = [Param(name, text) for name, text in texts.items()]
        client.log_batch(made.info.run_id, params=params[:_MOST_PARAMS])
        return str(made.info.run_id)

    def append(self, rows: Sequence[Row]) -> None:
        if self._client is None:
            raise SinkError("it is not open")
        metrics = []
        for row in rows:
            point = point_of(row)
            at_ms = int(1000 * (self._run.began_s + point.time_s))
            named = ((_NOT_IN_NAMES.sub("_", name), number) for name, number in point.figures.items())
            metrics += [Metric(name, number, at_ms, point.step) for name, number in named]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics[first : first + _MOST_METRICS], synchronous=True)

    def sync(self) -> int:
        """Rows are stored once the client has sent them."""
        return 0

    def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            if self._id:
                client.set_terminated(self._id)
