"""A run on a server of Weights & Biases, by its package."""

from __future__ import annotations

from collections.abc import Sequence

import wandb

from asyncrl.sinks.figures import point_of
from asyncrl.sinks.sink import Position, Row, SinkError, SinkRun


class OnlineSink:
    """`MetricsSink` of a server. The number of a row is the step of Weights & Biases, which a server takes once."""

    def __init__(self, run: SinkRun, project: str, entity: str) -> None:
        self._run, self._project, self._entity = run, project, entity
        self._client: wandb.Run | None = None
        self._next = 0  # number of the next row

    def open(self, _position: Position | None) -> int:
        try:
            self._client = self._begun()
        except Exception:
            wandb.teardown()  # its service keeps a run that did not begin, and refuses to begin the run again
            raise
        self._client.define_metric("step")
        self._client.define_metric("*", step_metric="step")
        self._next = self._client.starting_step  # `step` is 0 until a row is logged
        return self._next

    def _begun(self) -> wandb.Run:
        return wandb.init(
            project=self._project,
            entity=self._entity or None,
            id=self._run.id,
            name=self._run.run,
            resume="allow",
            dir=str(self._run.root),
            config=self._run.settings,
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True),
        )

    def append(self, rows: Sequence[Row]) -> None:
        if self._client is None:
            raise SinkError("it is not open")
        for row in rows:
            point = point_of(row)
            self._client.log({**point.figures, "step": point.step}, step=self._next, commit=True)
            self._next += 1

    def sync(self) -> int:
        """The package sends rows in the background: after a kill, the server tells `open` which ones it has."""
        return 0

    def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            client.finish()
