"""The sinks of the recorder: each takes rows on a thread, from its stored position, and may fail without any effect."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from actors.recorder.sink_task import SinkTask
from actors.recorder.traces import TracesTask
from actors.runtime.actor import Context
from asyncrl.background import on_daemon_thread
from asyncrl.bus.log import Record
from asyncrl.config.settings import Config
from asyncrl.run.directory import RunFiles
from asyncrl.sinks.feed import SinkFeed
from asyncrl.sinks.sink import SinkError, SinkRun, SinkSettings
from topics.topic import Topic

_END_S = 10.0  # that sinks may take for the last rows at the end of a run; `asyncrl export` writes what is missing then


class Sinks:
    """All sinks of a run except `metrics.jsonl`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._rows: list[_RowsTask] = []
        self._traces: list[TracesTask] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def any(self) -> bool:
        """Return whether the run has any."""
        return bool(self._context.config.metrics)

    def begin(self, began_s: float) -> None:
        """Start them, if they have not been started.

        Args:
            began_s: when the run began, as Unix time.
        """
        if not self._tasks:
            run = sink_run(self._context.config, self._context.files, began_s)
            for name, settings in named(self._context.config.metrics):
                if settings.traces:
                    self._traces.append(TracesTask(self._context, name, settings))
                else:
                    self._rows.append(_RowsTask(self._context, name, settings, run))
            self._tasks = [asyncio.ensure_future(one.run()) for one in (*self._rows, *self._traces)]

    def offer(self, end: int) -> None:
        """Tell sinks up to which byte the rows of the metrics are final."""
        for one in self._rows:
            one.end = end
            one.news.set()

    def stored(self, topic: Topic[Any], record: Record) -> None:
        """Tell sinks that take traces of a record of the run: trajectories may have ended with it."""
        for one in self._traces:
            one.stored(topic, record)

    async def finish(self) -> None:
        """Give sinks time for what they lack, then leave them."""
        for one in (*self._rows, *self._traces):
            one.ended.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_END_S)
        self.cancel()

    def cancel(self) -> None:
        """Leave all sinks: a thread that hangs ends with the process."""
        for task in self._tasks:
            task.cancel()


class _RowsTask(SinkTask):
    """A sink that takes rows of metrics."""

    def __init__(self, context: Context, name: str, settings: SinkSettings, run: SinkRun) -> None:
        super().__init__(context, name, settings)
        self._run = run
        self.end = 0  # bytes of the metrics that are final

    async def _write(self) -> None:
        feed = SinkFeed(self._name, self._settings.sink(self._run), self._context.files.metrics)
        try:
            await on_daemon_thread(feed.open)
            while True:
                self.news.clear()
                last = self.ended.is_set()
                while await on_daemon_thread(feed.advance, self.end):
                    self._context.vitals[f"{self._name}_sink_rows"] = feed.total
                self._works()
                if last:
                    break
                await self._gathered()
        except SinkError:
            with suppress(SinkError):
                await on_daemon_thread(feed.close)
            raise
        await on_daemon_thread(feed.close)


def sink_run(config: Config, files: RunFiles, began_s: float) -> SinkRun:
    """Return the run that sinks are made for."""
    return SinkRun(config.run, files.root, files.base, began_s, msgspec.to_builtins(config))


def named(sinks: Sequence[SinkSettings]) -> list[tuple[str, SinkSettings]]:
    """Return sinks with their names: the kind, with a number from the second one of a kind on."""
    found: list[tuple[str, SinkSettings]] = []
    for sink in sinks:
        count = 1 + sum(other.kind == sink.kind for _, other in found)
        found.append((sink.kind if count == 1 else f"{sink.kind}-{count}", sink))
    return found
