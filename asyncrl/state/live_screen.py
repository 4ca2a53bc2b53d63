"""A run on a terminal while it runs: a live panel, and lines elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from asyncrl.state.records import EventKind, duration
from asyncrl.state.screen import render
from asyncrl.telemetry.printable import printable
from topics.runs import RunEvent, RunStatus

REFRESH_S = 0.5
_STYLES = {"step": "", "news": "bold", "warning": "yellow"}


class RunView:
    """The published state of a run, and the events that were not shown yet."""

    def __init__(self) -> None:
        self.status: RunStatus | None = None
        self._began_s = time.time()
        self._shown: set[tuple[float, str]] = set()  # news and warnings
        self._step_s = 0.0  # time of the newest step that was shown
        self._new: list[RunEvent] = []

    def take(self, status: RunStatus) -> None:
        """Take in a newer state."""
        self.status, self._began_s = status, status.at_s - status.elapsed_s
        for event in status.events:
            if event.kind != "step" and (event.at_s, event.text) not in self._shown:
                self._shown.add((event.at_s, event.text))
                self._new.append(event)
        for step in [event for event in status.events if event.kind == "step"][-1:]:
            if step.at_s > self._step_s:
                self._step_s = step.at_s
                self._new.append(step)

    def take_end(self, status: RunStatus) -> None:
        """Take in the state at the end, whose events were read from the logs again: only those with new texts count."""
        known = {text for _, text in self._shown}
        new = sorted((one for one in status.events if one.text not in known), key=lambda event: event.at_s)
        self.take(msgspec.structs.replace(status, events=new))

    def report(self, kind: EventKind, text: str) -> None:
        """Add an event of this process, which no topic has."""
        self._new.append(RunEvent(kind, time.time(), text))

    def take_events(self) -> list[tuple[EventKind, str]]:
        """Return the kind and the line of each new event, such as `  0:12  version 0 published`."""
        new, self._new = self._new, []
        return [(event.kind, f"{duration(event.at_s - self._began_s):>6}  {printable(event.text)}") for event in new]


class Lines:
    """One line per event; of steps the newest at each refresh."""

    def refresh(self, view: RunView) -> None:
        """Print new events."""
        for _, line in view.take_events():
            print(line, flush=True)

    close = refresh


class Screen:
    """A panel that is redrawn; events scroll by above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def refresh(self, view: RunView) -> None:
        """Draw the panel."""
        for kind, line in view.take_events():
            if kind != "step":
                self._console.print(Text(line, _STYLES[kind]), soft_wrap=True)
        if view.status is not None:
            # Room for the ^C that a terminal writes after the panel: a wrapped one would shift everything.
            self._live.update(render(view.status, self._console.width - 3), refresh=True)

    def close(self, view: RunView) -> None:
        """Take the panel away; what happened stays."""
        self.refresh(view)
        self._live.stop()


@contextlib.asynccontextmanager
async def shown(view: RunView, console: Console) -> AsyncIterator[None]:
    """Show a run for as long as the block runs."""
    show = Screen(console) if console.is_terminal else Lines()

    async def refresh() -> None:
        while True:
            show.refresh(view)
            await asyncio.sleep(REFRESH_S)  # a picture is drawn by the clock, not once per message

    task = asyncio.create_task(refresh())
    try:
        yield
    finally:
        task.cancel()
        show.close(view)
