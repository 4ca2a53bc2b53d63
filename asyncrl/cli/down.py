"""`asyncrl down`: ask a run to stop, and wait until it has."""

from __future__ import annotations

import argparse
import asyncio

from asyncrl.api.requests import stop
from asyncrl.cli.target import add_run, add_wait, live_run
from asyncrl.errors import AsyncRLError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "the live one")
    add_wait(parser)


def run(arguments: argparse.Namespace) -> int:
    """Request, wait, report how it ended."""
    found = live_run(arguments)

    def requested() -> None:
        print(f"asked run {found.run} to stop", flush=True)

    try:
        asyncio.run(asyncio.wait_for(stop(found, "asyncrl down", requested), arguments.wait))
    except TimeoutError:
        raise AsyncRLError(
            f"run {found.run} has not ended within {arguments.wait:.0f} s; look at `asyncrl status {found.run}`, or "
            "press Ctrl-C twice where it was started"
        ) from None
    print(f"run {found.run} has ended")
    return 0
