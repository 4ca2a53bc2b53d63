"""Find a run and connect to its topics, live or over; the server of a run that is over is started for as long."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

from asyncrl.background import first_of
from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusDenied, BusUnreachable
from asyncrl.bus.log import LogReader, Record, read_last, read_last_of_each
from asyncrl.bus.merged_reader import newest_message
from asyncrl.bus.provision import is_provisioned, settled
from asyncrl.bus.server import OwnServer, server_left_in
from asyncrl.config.worker_pools import pools_in
from asyncrl.errors import AsyncRLError
from asyncrl.files import UNWRITABLE
from asyncrl.locks import take, try_lock
from asyncrl.run.directory import JOINED, READING, RunFiles, is_locked, is_taken, made_at
from asyncrl.run.user_actors import ActorsError, load_actors, with_pools
from topics.actors import ACTOR_STARTED, ACTOR_STOPPED, RUN_OPENED
from topics.table import BUILT_IN, Tables
from topics.topic import ACTORS


class RunNotFound(AsyncRLError):
    """No such run, or it cannot be reached."""


class NoSuchRun(RunNotFound):
    """Nothing has this name."""


class RunStarts(RunNotFound):
    """A run that cannot be reached yet."""


class FoundRun(NamedTuple):
    """A run that a command is about: its name, its directory, and how its topics are reached."""

    run: str
    root: Path | None  # its directory; None if it is on another machine
    login: BusAddress | None = None  # that was given for it, instead of the one in its directory

    @property
    def files(self) -> RunFiles:
        """Its directory, which must be on this machine."""
        assert self.root is not None
        return RunFiles(self.root)

    @property
    def is_held(self) -> bool:
        """Return whether a living `asyncrl up` holds its directory; True if that is on another machine."""
        return self.root is None or is_locked(self.root)

    def absent(self, why: str) -> RunNotFound:
        """Return why its topics are not there, and whether they may be soon: one that is resumed has those of before,
        which are over, or whose server is not up yet.
        """
        return (RunStarts if self.root is not None and self.is_held else RunNotFound)(f"run {self.run} {why}")

    @property
    def address(self) -> BusAddress:
        """The server of its topics, and a login there.

        Raises:
            RunNotFound: it has no server yet, or never had one.
        """
        if self.login is not None:
            return self.login
        try:
            return BusAddress.read(self.files.address)
        except FileNotFoundError:
            if self.is_held:
                text = f"run {self.run} is still starting: {self.root} has no nats.json yet; try again"
                raise RunStarts(text) from None
            text = f"run {self.run} has no topics: {self.root} has no nats.json, so it never had a server"
            raise RunNotFound(text) from None


def find_run(name: str, folder: Path, *, live: bool) -> FoundRun:
    """Find a run on this machine: the named one, else the live one, else (not `live`) the newest.

    Args:
        name: id or directory; empty for none.
        folder: holds the directories of runs.
        live: it must not be over.

    Raises:
        RunNotFound: there is none, several are live, it was moved, or it is over.
    """
    root = _directory(name, folder, live=live).resolve()
    place = made_at(root)
    if place != root:
        raise RunNotFound(
            f"the directory {root} was made as {place}, and the run's logs name files by that path; move it back, or "
            "mount it there"
        )
    if live and not is_locked(root):
        words = f"`asyncrl status {root.name}` shows how it ended; its results are in {root}"
        raise RunNotFound(f"run {root.name} is over; {words}")
    return FoundRun(root.name, root)


def named_directory(name: str, folder: Path) -> Path | None:
    """Return the directory of a run: below a folder, or itself; None if it does not exist."""
    return next((root for root in (folder / name, Path(name)) if (root / "config.json").exists()), None)


def _directory(name: str, folder: Path, *, live: bool) -> Path:
    configs = sorted(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    roots = [path.parent for path in configs]
    if name:
        root = named_directory(name, folder)
        if root is None:
            known = ", ".join(sorted(root.name for root in roots)) or "none"
            raise NoSuchRun(f"no run called {name} under {folder.absolute()}; runs there: {known}")
        return root
    living = [root for root in roots if is_locked(root)]
    if len(living) > 1:
        names = ", ".join(sorted(root.name for root in living))
        raise RunNotFound(f"{len(living)} runs are live under {folder.absolute()}: {names}; name the one you mean")
    if living:
        return living[0]
    if live or not roots:
        raise RunNotFound(
            f"no {'live ' if live else ''}run under {folder.absolute()}; start one with `asyncrl up`, change to the "
            "folder it was started in or name its runs by --directory, or give --url and RUN"
        )
    return roots[0]


SUPERVISOR = "supervisor-1"
RECOVER_S = 120.0  # for a server to read its store
_POLL_S = 0.05  # between two looks at a lock
_AWAY_S = 5.0  # a server that is away this long does not come back: its run has ended


@asynccontextmanager
async def connected(found: FoundRun, name: str, *, over_is_fine: bool = False) -> AsyncIterator[Bus]:
    """A connection to a run's topics.

    Raises:
        RunNotFound: the server does not answer, holds no such run, or the run is over (unless that is fine).
    """
    address = found.address
    try:
        bus = await Bus.connect(address, found.run, name=name, deadline_s=3.0)
    except BusUnreachable as error:
        raise found.absent(f"cannot be reached: {error}") from error
    except BusDenied as error:
        raise RunNotFound(f"run {found.run} cannot be reached: {error}") from error
    try:
        if not await is_provisioned(bus):
            if found.root is not None and found.is_held:
                raise RunStarts(f"run {found.run} is still starting: its streams are not made yet; try again")
            raise NoSuchRun(f"the server at {address.url} holds no run called {found.run}")
        if not over_is_fine and await is_over(bus, for_good=True):
            raise found.absent("is over")
        if found.root is not None:  # code that a run of another user names is not imported here
            bus.tables = await _tables_of(bus)
        yield bus
        if bus.ended_by is not None:
            raise bus.ended_by
    finally:
        await bus.close()


async def _tables_of(bus: Bus) -> Tables:
    """Return the tables of a run, with its user's actors if this program finds their modules."""
    newest = await newest_message(bus, RUN_OPENED)
    with contextlib.suppress(LookupError, TypeError, ActorsError):  # it shows its known state
        if newest is not None:
            opened, _ = newest
            return with_pools(load_actors(opened.settings["actors"], Path(opened.base)), pools_in(opened.settings))
    return BUILT_IN


async def is_over(bus: Bus, *, for_good: bool = False) -> bool:
    """Return whether the run's supervisor has left.

    Args:
        for_good: False if it failed and its owner restarts it.
    """
    subjects = [topic.subject(bus.run, SUPERVISOR) for topic in (ACTOR_STARTED, ACTOR_STOPPED)]
    newest = max(await read_last_of_each(bus, ACTORS, subjects), key=lambda record: record.sequence, default=None)
    if newest is None or bus.tables.topic_of(newest.subject) is not ACTOR_STOPPED:
        return False
    return not (for_good and _starts_again(newest))


def _starts_again(end: Record) -> bool:
    return "again" in end.headers


async def newest_end(bus: Bus) -> int:
    """Sequence of the newest stop of the run's supervisor; 0 without a stop."""
    newest = await read_last(bus, ACTOR_STOPPED, SUPERVISOR)
    return 0 if newest is None else newest.sequence


async def run_ended(bus: Bus, after: int | None = None) -> None:
    """Wait until the supervisor publishes an end without another start, or a server went away and does not come back.

    Args:
        after: the `newest_end` that does not count; unless given, the one there is by now.
    """
    left = asyncio.Event()

    def note(end: Record) -> None:
        if not _starts_again(end):
            left.set()

    subject = ACTOR_STOPPED.subject(bus.run, SUPERVISOR)
    after = await newest_end(bus) if after is None else after
    reader = LogReader(bus, ACTORS, note, after=after, subjects=[subject])
    await reader.start()
    try:
        await first_of(left.wait(), _server_gone(bus))
    finally:
        await reader.close()


async def _server_gone(bus: Bus) -> None:
    away = 0.0
    while away < _AWAY_S and bus.ended_by is None:
        await asyncio.sleep(0.2)  # the client reports the loss of a connection, never that it stays lost
        away = 0.0 if bus.client.is_connected else away + 0.2


@asynccontextmanager
async def opened(found: FoundRun, name: str) -> AsyncIterator[Bus]:
    """A connection to the topics of a run, live or over; its own server is started where the run is over.

    Raises:
        RunNotFound: it cannot be reached, or its own server not started for want of room.
        BusUnreachable: its own server cannot be started again.
    """
    async with (
        _served(found) if found.root is not None else nullcontext() as own,
        connected(found, name, over_is_fine=True) as bus,
    ):
        if own and bus.clustered:
            await settled(bus)
        yield bus


@asynccontextmanager
async def _served(found: FoundRun) -> AsyncIterator[bool]:
    """Have a server for the topics of a run on this machine; the value says whether this process has started it.

    The process that starts it stops it after all that joined. To start and to stop it is to hold the lock
    `JOINED` alone, to read through it is to share that.
    """
    root = found.files.root
    while not is_locked(root):
        with _writing(found):
            joined = os.open(root / JOINED, os.O_RDWR | os.O_CREAT, 0o600)
        with _closing(joined):
            with _writing(found):
                lock = _lock(root) if try_lock(joined) else None
            if lock is not None:
                with _closing(lock):
                    async with _started(found, joined) as server:
                        yield server is not None
                return
            if try_lock(joined, shared=True) and is_taken(root / READING):
                yield False
                return
        await asyncio.sleep(_POLL_S)  # it is being started, or stopped
    yield False


@asynccontextmanager
async def _started(found: FoundRun, joined: int) -> AsyncIterator[OwnServer | None]:
    """Start the server of a finished run, if it had one, and let others join."""
    server = server_left_in(found.files.root)
    try:
        if server is not None:
            with _writing(found):
                await server.start(RECOVER_S)
        try_lock(joined, shared=True)
        yield server
    finally:
        try:
            await _alone(joined)
        finally:  # also where the wait is cancelled
            if server is not None:
                await server.stop()


async def _alone(joined: int) -> None:
    """Wait until no other process shares a lock, and hold it."""
    while True:
        if try_lock(joined):
            return
        await asyncio.sleep(_POLL_S)


@contextmanager
def _closing(handle: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(handle)


@contextmanager
def _writing(found: FoundRun) -> Iterator[None]:
    """Name the run whose directory takes no file: without one, its topics cannot be read either."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        remedy = "make it writable" if error.errno == errno.EROFS else "free some room there"
        raise RunNotFound(
            f"run {found.run}: its NATS server, which writes into {found.root}, cannot be started to read its topics: "
            f"{error.strerror}; {remedy}"
        ) from error


def _lock(root: Path) -> int | None:
    """Lock the store of a finished run, so that no other process opens it; None if another holds it."""
    lock = take(root / READING)
    if lock is None or is_locked(root):
        if lock is not None:
            os.close(lock)
        return None
    os.truncate(lock, 0)
    os.write(lock, f"`{' '.join(['asyncrl', *sys.argv[1:]])}` (process {os.getpid()})".encode())
    return lock
