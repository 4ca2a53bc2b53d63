"""Finding a run from another terminal: its address lies in its directory, or is given on the command line."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusDenied, BusUnreachable
from asyncrl.bus.log import LogReader, read_last, read_last_of_each
from asyncrl.bus.provision import is_provisioned
from asyncrl.errors import Fault
from topics.actors import ACTOR_STARTED, ACTOR_STOPPED
from topics.table import topic_of
from topics.topic import ACTORS

WARDEN = "warden-1"
_AWAY_S = 5.0  # a server that is away this long does not come back: its run has ended


class RunNotFound(Fault):
    """No such run, or it cannot be reached."""


class FoundRun(NamedTuple):
    """A run and how to reach it."""

    run: str
    address: BusAddress
    root: Path | None  # its directory, where it is on this machine


def is_remote(arguments: argparse.Namespace) -> bool:
    """Whether the command line says itself how to reach the run."""
    return bool(arguments.url or arguments.credentials)


def find_run(arguments: argparse.Namespace) -> FoundRun:
    """The run that the command line means.

    Raises:
        RunNotFound: there is none, or it is over.
    """
    if is_remote(arguments):
        if not arguments.run_id:
            raise RunNotFound("--url and --credentials name a server, not a run: give the run's id as well")
        return FoundRun(arguments.run_id, _given_address(arguments), None)
    root = find_directory(arguments, live=True)
    if not is_locked(root):
        raise RunNotFound(f"run {root.name} is over; its results are in {root}")
    try:
        return FoundRun(root.name, BusAddress.read(root / "nats.json"), root)
    except FileNotFoundError:
        raise RunNotFound(f"run {root.name} is still starting: {root} has no nats.json yet; try again") from None


def _given_address(arguments: argparse.Namespace) -> BusAddress:
    if "@" in arguments.url:
        raise RunNotFound("--url holds credentials, which everybody on this machine can read; use --password-file")
    try:
        if arguments.credentials:
            address = BusAddress.read(Path(arguments.credentials))
            changed = {"url": arguments.url, "tls_ca": arguments.tls_ca}
            return msgspec.structs.replace(address, **{key: value for key, value in changed.items() if value})
        password = Path(arguments.password_file).read_text().strip() if arguments.password_file else ""
    except (OSError, ValueError) as error:
        raise RunNotFound(f"who to be cannot be read: {error}") from error
    return BusAddress(arguments.url, arguments.user, password, tls_ca=arguments.tls_ca)


def find_directory(arguments: argparse.Namespace, *, live: bool) -> Path:
    """Directory of the run that is meant: the named one, else the live one, else (not `live`) the newest.

    Raises:
        RunNotFound: there is none, several are live, or it was moved.
    """
    return _unmoved(_chosen(arguments, live=live).resolve())


def _chosen(arguments: argparse.Namespace, *, live: bool) -> Path:
    folder = Path(arguments.directory)
    if arguments.run_id:
        for root in (folder / arguments.run_id, Path(arguments.run_id)):
            if (root / "cast.json").exists():
                return root
        known = ", ".join(sorted(path.parent.name for path in folder.glob("*/cast.json"))) or "none"
        raise RunNotFound(f"no run called {arguments.run_id} under {folder.absolute()}; runs there: {known}")
    roots = sorted((path.parent for path in folder.glob("*/cast.json")), key=_started, reverse=True)
    living = [root for root in roots if is_locked(root)]
    if len(living) > 1:
        names = ", ".join(sorted(root.name for root in living))
        raise RunNotFound(f"{len(living)} runs are live under {folder.absolute()}: {names}; name the one you mean")
    if living:
        return living[0]
    if live or not roots:
        raise RunNotFound(
            f"no {'live ' if live else ''}run under {folder.absolute()}; start one with `asyncrl up`, change to the "
            "folder it was started in, or give --url and RUN"
        )
    return roots[0]


def _unmoved(root: Path) -> Path:
    """The directory, unless it lies elsewhere than where it was made."""
    place = made_at(root)
    if place != root:
        raise RunNotFound(
            f"the directory {root} was made as {place}, and the run's logs name files by that path; move it back, or "
            "mount it there"
        )
    return root


def made_at(root: Path) -> Path:
    """Where a run directory, given without links, was made; its logs name files by that path."""
    location = root / "location"
    return Path(location.read_text(encoding="utf-8")) if location.exists() else root


def is_locked(directory: Path) -> bool:
    """Whether a living `asyncrl up` holds a run directory."""
    try:
        handle = os.open(directory / "lock", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        # Shared, so that two who ask at once do not take each other for the holder.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


@asynccontextmanager
async def connected(found: FoundRun, name: str, *, over_is_fine: bool = False) -> AsyncIterator[Bus]:
    """A connection to a run's topics.

    Raises:
        RunNotFound: the server does not answer, holds no such run, or the run is over (unless that is fine).
    """
    try:
        bus = await Bus.connect(found.address, found.run, name=name, deadline_s=3.0)
    except (BusUnreachable, BusDenied) as error:
        raise RunNotFound(f"run {found.run} cannot be reached: {error}") from error
    try:
        if not await is_provisioned(bus):
            raise RunNotFound(f"the server at {found.address.url} holds no run called {found.run}")
        if not over_is_fine and await is_over(bus):
            raise RunNotFound(f"run {found.run} is over")
        yield bus
        if bus.ended_by is not None:
            raise bus.ended_by
    finally:
        await bus.close()


@asynccontextmanager
async def server_connected(arguments: argparse.Namespace) -> AsyncIterator[Bus]:
    """A connection to the server that the command line names, whatever runs it holds.

    Raises:
        RunNotFound: it does not answer, or lets nobody in by that name.
    """
    address = _given_address(arguments)
    try:
        bus = await Bus.connect(address, "none", name="runs", deadline_s=3.0)
    except (BusUnreachable, BusDenied) as error:
        raise RunNotFound(f"the server at {address.url} cannot be reached: {error}") from error
    try:
        yield bus
    finally:
        await bus.close()


async def is_over(bus: Bus) -> bool:
    """Whether the run's warden has left."""
    subjects = [topic.subject(bus.run, WARDEN) for topic in (ACTOR_STARTED, ACTOR_STOPPED)]
    newest = max(await read_last_of_each(bus, ACTORS, subjects), key=lambda record: record.sequence, default=None)
    return newest is not None and topic_of(newest.subject) is ACTOR_STOPPED


async def newest_end(bus: Bus) -> int:
    """Sequence of the newest stop of the run's warden; 0 where there is none."""
    newest = await read_last(bus, ACTORS, ACTOR_STOPPED.subject(bus.run, WARDEN))
    return 0 if newest is None else newest.sequence


async def run_ended(bus: Bus, after: int | None = None) -> None:
    """Wait for the warden's last word, or for a server that went away and does not come back.

    Args:
        after: the `newest_end` that does not count; unless given, the one there is by now.
    """
    left = asyncio.Event()
    subject = ACTOR_STOPPED.subject(bus.run, WARDEN)
    after = await newest_end(bus) if after is None else after
    reader = LogReader(bus, ACTORS, lambda _: left.set(), after=after, subjects=[subject])
    await reader.start()
    waits = {asyncio.create_task(left.wait()), asyncio.create_task(_server_gone(bus))}
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await reader.close()


async def _server_gone(bus: Bus) -> None:
    away = 0.0
    while away < _AWAY_S and bus.ended_by is None:
        await asyncio.sleep(0.2)  # the client tells of the loss of a connection, never that it stays lost
        away = 0.0 if bus.client.is_connected else away + 0.2


def _started(root: Path) -> float:
    return (root / "cast.json").stat().st_mtime
