"""Removing runs that are over: their directories here, their topics on a server."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from asyncrl.bus.address import BusAddress
from asyncrl.bus.provision import remove_streams
from asyncrl.errors import AsyncRLError
from asyncrl.run.connect import FoundRun, RunNotFound, connected, is_over, named_directory
from asyncrl.run.directory import RunFiles, is_locked, made_at, reader_of


def remove_directory(folder: Path, name: str, *, force: bool) -> str:
    """Remove the directory of a finished run, and its topics if they are on a shared server.

    Args:
        folder: holds the directories of runs.
        name: id or directory of the run.
        force: also the topics of a run that was moved, or whose supervisor died and left them.

    Returns:
        A sentence that names the removed parts.

    Raises:
        AsyncRLError: there is none, it is live, or its topics cannot be removed.
    """
    root = named_directory(name, folder)
    if root is None:
        raise RunNotFound(f"no run called {name} under {folder.absolute()}; `asyncrl runs` lists them")
    if root.is_symlink():
        raise AsyncRLError(f"{root} is a link to {root.resolve()}; remove the run there, or delete the link")
    root = root.resolve()
    if is_locked(root):
        raise AsyncRLError(f"run {root.name} is live; stop it with `asyncrl down {root.name}` first")
    if reader := reader_of(root):
        raise AsyncRLError(f"{reader} reads run {root.name}; wait until it has ended, or end it")
    files, config = RunFiles(root), RunFiles(root).read_config()
    url = config.nats.url
    about = ""
    if url and _owns_topics(root, url, force=force):  # they lie on an external server
        try:
            found = FoundRun(config.run, root, BusAddress.read(files.address))
            about = f", {asyncio.run(remove_topics(found, force=force))} streams from {url}"
        except (AsyncRLError, OSError) as error:
            raise AsyncRLError(
                f"run {root.name}: its topics on {url} cannot be removed: {error}; to remove only the directory, "
                f"delete {root}"
            ) from error
    shutil.rmtree(root)
    return f"run {root.name}: removed {root}{about}"


def _owns_topics(root: Path, url: str, *, force: bool) -> bool:
    """Return whether the topics go with a directory: those of a copy belong to the run that was copied.

    Raises:
        AsyncRLError: nothing on this machine distinguishes a copy from a run that was moved.
    """
    place = made_at(root)
    if not (force or place == root or place.exists()):
        raise AsyncRLError(
            f"{root} was made as {place}: if that is on another machine, the topics on {url} are those of the run "
            "there; remove both directory and topics with --force, or delete only the directory"
        )
    return place == root or not place.exists()


async def remove_topics(found: FoundRun, *, force: bool) -> int:
    """Remove the topics of a run that is over; returns the number of its streams.

    Args:
        force: also where its supervisor died and left them.

    Raises:
        AsyncRLError: it has not ended.
        RunNotFound: it cannot be reached.
    """
    async with connected(found, "rm", over_is_fine=True) as bus:
        if not (force or await is_over(bus)):
            raise AsyncRLError(
                f"run {bus.run} has not ended: its supervisor has published no stop; stop it with `asyncrl down "
                f"{bus.run}`, or remove it with --force if it died"
            )
        return await remove_streams(bus)
