"""`asyncrl down`: ask a run to stop, and wait until it has."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from asyncrl.bus.errors import BusError
from asyncrl.bus.talk import say
from asyncrl.cli.find import FoundRun, RunNotFound, add_run_arguments, connected, find_run, is_locked, run_ended
from topics.actors import STOP_REQUESTED, StopRequested

_LOOK_S = 0.2


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("down", help="stop a run; `up --resume` goes on with it")
    add_run_arguments(parser, positional=True)
    parser.add_argument("--wait", type=float, default=60.0, metavar="SECONDS", help="give up after (default: 60)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask, wait, say how it ended."""
    try:
        found = find_run(arguments)
        asyncio.run(_stop(found, arguments.wait))
    except (RunNotFound, BusError) as error:
        print(error, file=sys.stderr)
        return 1
    except TimeoutError:
        print(
            f"run {found.run} has not ended within {arguments.wait:.0f} s; look at `asyncrl status {found.run}`, or "
            "press Ctrl-C twice where it was started",
            file=sys.stderr,
        )
        return 1
    print(f"run {found.run} has ended")
    return 0


async def _stop(found: FoundRun, wait_s: float) -> None:
    async with asyncio.timeout(wait_s):
        async with connected(found, "down") as bus:
            ending = asyncio.create_task(run_ended(bus))
            await say(bus, STOP_REQUESTED, StopRequested("asyncrl down"), id=str(time.time_ns()))
            print(f"asked run {found.run} to stop", flush=True)
            await ending
        if found.root is not None:
            await _unlocked(found.root)


async def _unlocked(root: Path) -> None:
    """Wait until `asyncrl up` has stopped the server too and left the directory; neither tells when."""
    while True:
        if not is_locked(root):
            return
        await asyncio.sleep(_LOOK_S)
