"""The sinks of the recorder: each takes rows on a thread, from its stored position, and may fail without any effect."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from actors.runtime.actor import Context
from asyncrl.background import first_of, on_daemon_thread
from asyncrl.config.settings import Config
from asyncrl.run.directory import RunFiles
from asyncrl.sinks.feed import SinkFeed
from asyncrl.sinks.sink import SinkError, SinkRun, SinkSettings
from asyncrl.state.health_checks import SINK_FAILURES

_PAUSE_S = (1.0, 60.0)  # after a failure; each further one doubles it up to the second number
_END_S = 10.0  # that sinks may take for the last rows at the end of a run; `asyncrl export` writes what is missing then


class Sinks:
    """All sinks of a run except `metrics.jsonl`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sinks: list[_Sink] = []
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
        if not self._sinks:
            run = sink_run(self._context.config, self._context.files, began_s)
            self._sinks = [_Sink(self._context, name, one, run) for name, one in named(self._context.config.metrics)]
            self._tasks = [asyncio.ensure_future(sink.run()) for sink in self._sinks]

    def offer(self, end: int) -> None:
        """Tell all sinks up to which byte the rows of the metrics are final."""
        for sink in self._sinks:
            sink.end = end
            sink.news.set()

    async def finish(self) -> None:
        """Give sinks time for the rows that they lack, then leave them."""
        for sink in self._sinks:
            sink.last = True
            sink.news.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_END_S)
        self.cancel()

    def cancel(self) -> None:
        """Leave all sinks: a thread that hangs ends with the process."""
        for task in self._tasks:
            task.cancel()


class _Sink:
    """One sink."""

    def __init__(self, context: Context, name: str, settings: SinkSettings, run: SinkRun) -> None:
        self._context, self._name, self._settings, self._run = context, name, settings, run
        self.end = 0  # bytes of the metrics that are final
        self.news = asyncio.Event()
        self.last = False  # the end does not change any more

    async def run(self) -> None:
        """Write rows until the last one, again and again after a failure."""
        failures = 0
        while True:
            try:
                await self._write()
            except SinkError as error:
                failures += 1
                self._context.count(f"{self._name}_sink_failures")
                self._context.vitals[f"{SINK_FAILURES}{self._name}"] = failures
                self._context.log.error("sink fails", sink=self._name, failures=failures, reason=str(error))
                await asyncio.sleep(min(_PAUSE_S[1], _PAUSE_S[0] * 2 ** (failures - 1)))
            else:
                return

    async def _write(self) -> None:
        if problem := self._settings.problem():
            raise SinkError(problem)
        feed = SinkFeed(self._name, self._settings.sink(self._run), self._context.files.metrics)
        try:
            await on_daemon_thread(feed.open)
            while True:
                self.news.clear()
                last = self.last
                while await on_daemon_thread(feed.advance, self.end):
                    self._context.vitals[f"{self._name}_sink_rows"] = feed.total
                self._context.vitals.pop(f"{SINK_FAILURES}{self._name}", None)
                if last:
                    break
                await first_of(self.news.wait())
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
