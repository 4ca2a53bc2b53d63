"""A task of the recorder that gives a sink what it lacks, and may fail without any effect on the run."""

from __future__ import annotations

import asyncio

from actors.runtime.actor import Context
from asyncrl.background import first_of
from asyncrl.bus.errors import BusError
from asyncrl.sinks.sink import SinkError, SinkSettings
from asyncrl.state.health_checks import SINK_FAILURES

_GATHER_S = 5.0  # between two writes: each costs some tools 10 ms of CPU time
_PAUSE_S = (1.0, 60.0)  # after a failure; each further one doubles it up to the second number


class SinkTask:
    """One sink, which is written again after each failure."""

    def __init__(self, context: Context, name: str, settings: SinkSettings) -> None:
        self._context, self._name, self._settings = context, name, settings
        self.news = asyncio.Event()
        self.ended = asyncio.Event()  # nothing follows any more

    async def run(self) -> None:
        """Write until the end, again and again after a failure."""
        failures = 0
        while True:
            try:
                if problem := self._settings.problem():
                    raise SinkError(problem)
                await self._write()
            except (SinkError, BusError) as error:
                failures += 1
                self._context.count(f"{self._name}_sink_failures")
                self._context.vitals[f"{SINK_FAILURES}{self._name}"] = failures
                self._context.log.error("sink fails", sink=self._name, failures=failures, reason=str(error))
                await asyncio.sleep(min(_PAUSE_S[1], _PAUSE_S[0] * 2 ** (failures - 1)))
            else:
                return

    async def _write(self) -> None:
        """Give the sink everything until the end.

        Raises:
            SinkError: the sink takes nothing now.
        """
        raise NotImplementedError

    async def _gathered(self) -> None:
        """Return when there are news, but not at once after a write: what comes meanwhile is written together."""
        await first_of(self.ended.wait(), timeout_s=_GATHER_S)
        await first_of(self.news.wait(), self.ended.wait())

    def _works(self) -> None:
        """Report that the sink takes everything again."""
        self._context.vitals.pop(f"{SINK_FAILURES}{self._name}", None)
