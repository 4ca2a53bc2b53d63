"""Showing a run while it goes on: a live panel on a terminal, lines elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from asyncrl.state.parts import Event
from asyncrl.state.run_state import RunState
from asyncrl.state.screen import duration, render
from asyncrl.state.status import run_status

REFRESH_S = 0.5
_STEP_LINE_S = 1.0  # between two lines about steps
_STYLES = {"step": "", "news": "bold", "warning": "yellow"}


class Lines:
    """One line per event; steps at most once a second."""

    def __init__(self) -> None:
        self._waiting: Event | None = None  # the newest step, not yet shown
        self._step_at = float("-inf")

    def refresh(self, state: RunState) -> None:
        """Print what is new."""
        for event in state.take_events():
            if event.kind == "step":
                self._waiting = event
                continue
            self._flush(state)
            self._print(event, state)
        if time.monotonic() - self._step_at >= _STEP_LINE_S:
            self._flush(state)

    def close(self, state: RunState) -> None:
        """Print the last step too."""
        self.refresh(state)
        self._flush(state)

    def _flush(self, state: RunState) -> None:
        if self._waiting is not None:
            self._print(self._waiting, state)
            self._waiting, self._step_at = None, time.monotonic()

    def _print(self, event: Event, state: RunState) -> None:
        print(event_line(event, state), flush=True)


class Screen:
    """A panel that is drawn anew; events scroll by above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def refresh(self, state: RunState) -> None:
        """Draw the panel."""
        for event in state.take_events():
            if event.kind != "step":
                self._console.print(Text(event_line(event, state), _STYLES[event.kind]), soft_wrap=True)
        # Room for the ^C that a terminal writes behind the panel: one that wraps would shift everything.
        self._live.update(render(run_status(state, time.time_ns()), self._console.width - 3), refresh=True)

    def close(self, state: RunState) -> None:
        """Take the panel away; what happened stays."""
        self.refresh(state)
        self._live.stop()


def event_line(event: Event, state: RunState) -> str:
    """`  0:12  version 0 published`."""
    return f"{duration((event.time_ns - state.first_ns) / 1e9):>6}  {event.text}"


@contextlib.asynccontextmanager
async def shown(state: RunState, console: Console) -> AsyncIterator[None]:
    """Show a run for as long as the block runs."""
    show = Screen(console) if console.is_terminal else Lines()

    async def refresh() -> None:
        while True:
            show.refresh(state)
            await asyncio.sleep(REFRESH_S)  # a picture is drawn by the clock, not once per message

    task = asyncio.create_task(refresh())
    try:
        yield
    finally:
        task.cancel()
        show.close(state)
