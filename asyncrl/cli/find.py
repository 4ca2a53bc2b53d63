"""Finding a run from another terminal: its address lies in its directory, or is given on the command line."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusDenied, BusUnreachable
from asyncrl.errors import AsyncRLError
from asyncrl.run.connect import FoundRun, RunNotFound
from asyncrl.run.directory import RunFiles, is_locked, made_at
from asyncrl.run.user_actors import load_actors


def is_remote(arguments: argparse.Namespace) -> bool:
    """Return whether the command line itself gives the run's address."""
    return bool(arguments.url or arguments.credentials)


def know_actors(arguments: argparse.Namespace) -> None:
    """Add the rows of the actors of the run that is meant to the tables, where its directory is here and names any."""
    with contextlib.suppress(AsyncRLError, OSError):
        files = RunFiles(find_directory(arguments, live=False))
        load_actors(files.read_config().actors, files.base)


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
        raise RunNotFound("--url holds credentials, which every user of this machine can read; use --password-file")
    try:
        if arguments.credentials:
            address = BusAddress.read(Path(arguments.credentials))
            changed = {"url": arguments.url, "tls_ca": arguments.tls_ca}
            return msgspec.structs.replace(address, **{key: value for key, value in changed.items() if value})
        password = Path(arguments.password_file).read_text().strip() if arguments.password_file else ""
    except (OSError, ValueError) as error:
        raise RunNotFound(f"the login cannot be read: {error}") from error
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
            if (root / "config.json").exists():
                return root
        known = ", ".join(sorted(path.parent.name for path in folder.glob("*/config.json"))) or "none"
        raise RunNotFound(f"no run called {arguments.run_id} under {folder.absolute()}; runs there: {known}")
    roots = sorted((path.parent for path in folder.glob("*/config.json")), key=_started, reverse=True)
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


@asynccontextmanager
async def server_connected(arguments: argparse.Namespace) -> AsyncIterator[Bus]:
    """A connection to the server that the command line names, whatever runs it holds.

    Raises:
        RunNotFound: it does not answer, or refuses the login.
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


def _started(root: Path) -> float:
    return (root / "config.json").stat().st_mtime
