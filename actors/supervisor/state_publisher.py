"""Publishes the state of the run once a second, for exporters, pages and other programs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from actors.runtime.actor import Context
from asyncrl.bus.errors import BusError
from asyncrl.bus.publish import send
from asyncrl.state.run_state import RunState
from asyncrl.state.status import run_status
from asyncrl.state.watch import Watch

_EVERY_S = 1.0
_LISTED = 256  # actors, and engines
_AGAIN_S = 5.0


async def follow_run(context: Context) -> Watch:
    """Follow the run from now on."""
    while True:
        watch = Watch(context.bus, RunState(context.bus.run, context.config.learner.steps))
        try:
            await watch.start()
        except BusError as error:  # nothing of the run depends on it
            context.log.warning("state not read", reason=str(error))
            await watch.close()
            await asyncio.sleep(_AGAIN_S)  # nothing announces that the server answers again
        else:
            return watch


async def publish_state(context: Context, watch: Watch, now: Callable[[], float]) -> None:
    """Publish the state of the run until the actor is asked to stop.

    Args:
        watch: of the run.
        now: the server's clock, seconds since the epoch.
    """
    while not context.stop.is_set():
        await send(context.bus, run_status(watch.state, int(now() * 1e9), most=_LISTED))
        await asyncio.sleep(_EVERY_S)
    await watch.close()
