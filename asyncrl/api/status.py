"""The state of a run, live or over."""

from __future__ import annotations

import time

from asyncrl.run.connect import FoundRun, opened
from asyncrl.state.status import run_status
from asyncrl.state.watch import read_state
from topics.runs import RunStatus


async def read_status(found: FoundRun) -> RunStatus:
    """Read the state of a run from its topics.

    Raises:
        RunNotFound: the run cannot be reached.
    """
    held = found.is_held  # asked before and after: an ending run stores its end after the messages that were read
    async with opened(found, "status") as bus:
        state = await read_state(bus)
    if not (held or found.is_held):
        state.on_gone()
    return run_status(state, state.last_ns if state.over else time.time_ns())
