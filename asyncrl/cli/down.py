"""`asyncrl down`: ask a run to stop, and wait until it has."""

from __future__ import annotations

import argparse
import asyncio

from asyncrl.bus.publish import publish
from asyncrl.cli.target import add_run, add_wait, live_run
from asyncrl.errors import AsyncRLError
from asyncrl.run.connect import FoundRun, connected, newest_end, run_ended
from topics.actors import StopRequested

_POLL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "the live one")
    add_wait(parser)


def run(arguments: argparse.Namespace) -> int:
    """Request, wait, report how it ended."""
    found = live_run(arguments)
    try:
        asyncio.run(_stop(found, arguments.wait))
    except TimeoutError:
        raise AsyncRLError(
            f"run {found.run} has not ended within {arguments.wait:.0f} s; look at `asyncrl status {found.run}`, or "
            "press Ctrl-C twice where it was started"
        ) from None
    print(f"run {found.run} has ended")
    return 0


async def _stop(found: FoundRun, wait_s: float) -> None:
    async with asyncio.timeout(wait_s):
        async with connected(found, "down") as bus:
            ending = asyncio.create_task(run_ended(bus, await newest_end(bus)))  # it may end before this task begins
            await publish(bus, StopRequested("asyncrl down"))
            print(f"asked run {found.run} to stop", flush=True)
            await ending
        if found.root is not None:
            await _released(found)


async def _released(found: FoundRun) -> None:
    """Wait until `asyncrl up` has stopped the server too and left the directory; no event announces either."""
    while True:
        if not found.is_held:
            return
        await asyncio.sleep(_POLL_S)
