"""Reading the logs of a run that goes on, or of one that is over: its own server is started again for as long."""

from __future__ import annotations

import argparse
import fcntl
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from asyncrl.bus.address import BusAddress
from asyncrl.bus.cluster import server_left_in
from asyncrl.bus.connection import Bus
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import Record
from asyncrl.bus.provision import settled
from asyncrl.cli.find import FoundRun, RunNotFound, connected, find_directory, find_run, is_remote
from topics.topic import Stream, Topic

_RECOVER_S = 120.0  # for a server to read its store


class Reading(Protocol):
    """What takes in logs."""

    def apply(self, topic: Topic[Any], message: Any, record: Record) -> None:
        """Fold one message in; `message` is None where only headers are read."""

    def refuse(self, record: Record, error: Exception) -> None:
        """Take note of a message that cannot be read."""


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


@asynccontextmanager
async def opened(root: Path, name: str) -> AsyncIterator[Bus]:
    """A connection to the topics of the run of a directory; its own server is started where the run is over.

    Raises:
        RunNotFound: it cannot be reached.
        BusUnreachable: its own server cannot be started again.
    """
    with _held(root) as held:
        server = server_left_in(root) if held else None
        try:
            if server is not None:
                await server.start(_RECOVER_S)
            async with connected(FoundRun(root.name, _address(root), root), name, over_is_fine=True) as bus:
                if server is not None and bus.clustered:
                    await settled(bus)
                yield bus
        finally:
            if server is not None:
                await server.stop()


async def read_log(
    bus: Bus, stream: Stream, subjects: Sequence[str], reading: Reading, *, headers_only: bool = False
) -> None:
    """Hand every message on some subjects of a log to `reading`, up to the log's end as it is now.

    Raises:
        BusGone: the server fell silent.
    """
    listener = Listener(bus, stream, reading.apply, reading.refuse, subjects=subjects, headers_only=headers_only)
    await listener.read()


@contextmanager
def _held(root: Path) -> Iterator[bool]:
    """Hold a run directory, so that nobody else opens its store meanwhile; False where a living run holds it."""
    lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = True
    except BlockingIOError:
        held = False
    try:
        yield held
    finally:
        os.close(lock)


def _address(root: Path) -> BusAddress:
    try:
        return BusAddress.read(root / "nats.json")
    except FileNotFoundError:
        raise RunNotFound(f"run {root.name} has no topics: {root} has no nats.json, so it never had a server") from None
