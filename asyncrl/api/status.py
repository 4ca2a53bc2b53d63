"""The state of a run, live or over."""

from __future__ import annotations

import time

from asyncrl.run.connect import FoundRun, opened
from asyncrl.state.published import next_status, read_moments
from asyncrl.state.status import run_status
from asyncrl.state.watch import read_state
from topics.runs import RunMoment, RunStatus


async def read_status(found: FoundRun) -> RunStatus:
    """Read the state of a run from its topics.

    Raises:
        RunNotFound: the run cannot be reached.
    """
    held = found.is_held  # asked before and after: an ending run stores its end after the messages that were read
    async with opened(found, "status") as bus:
        if held and (published := await next_status(bus)) is not None:
            return published
        state = await read_state(bus)  # no supervisor publishes: the run is over, or its supervisor starts
    if not (held or found.is_held):
        state.on_gone()
    return run_status(state, state.last_ns if state.over else time.time_ns())


async def read_history(found: FoundRun) -> list[RunMoment]:
    """Read the state of a run over time.

    Raises:
        RunNotFound: the run cannot be reached.
    """
    async with opened(found, "history") as bus:
        return await read_moments(bus)
