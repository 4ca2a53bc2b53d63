"""Reading the logs of a run that goes on, or of one that is over: its own server is started again for as long."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asyncrl.bus.connection import Bus
from asyncrl.cli.find import find_directory, find_run, is_remote
from asyncrl.run.connect import connected, opened


@asynccontextmanager
async def reached(arguments: argparse.Namespace, name: str) -> AsyncIterator[Bus]:
    """A connection to the topics of the run that the command line means, live or over.

    Raises:
        RunNotFound: there is none, or it cannot be reached.
        BusUnreachable: its own server cannot be started again.
    """
    if is_remote(arguments):
        async with connected(find_run(arguments), name, over_is_fine=True) as bus:
            yield bus
        return
    async with opened(find_directory(arguments, live=False), name) as bus:
        yield bus
