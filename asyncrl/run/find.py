"""Finding a run from another terminal: its address is in its directory, or is given with a login."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from asyncrl.bus.address import BusAddress
from asyncrl.errors import AsyncRLError
from asyncrl.run.directory import RunFiles, is_locked, made_at


class RunNotFound(AsyncRLError):
    """No such run, or it cannot be reached."""


class FoundRun(NamedTuple):
    """A run that a command is about: its name, its directory, and how its topics are reached."""

    run: str
    root: Path | None  # its directory; None where it is on another machine
    login: BusAddress | None = None  # that was given for it, instead of the one in its directory

    @property
    def files(self) -> RunFiles:
        """Its directory, which must be on this machine."""
        assert self.root is not None
        return RunFiles(self.root)

    @property
    def is_held(self) -> bool:
        """Return whether a living `asyncrl up` holds its directory; True where that is on another machine."""
        return self.root is None or is_locked(self.root)

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
            else:
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
        raise RunNotFound(f"run {root.name} is over; its results are in {root}")
    return FoundRun(root.name, root)


def named_directory(name: str, folder: Path) -> Path | None:
    """Return the directory of a run: below a folder, or itself; None where there is none."""
    return next((root for root in (folder / name, Path(name)) if (root / "config.json").exists()), None)


def _directory(name: str, folder: Path, *, live: bool) -> Path:
    configs = sorted(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    roots = [path.parent for path in configs]
    if name:
        root = named_directory(name, folder)
        if root is None:
            known = ", ".join(sorted(root.name for root in roots)) or "none"
            raise RunNotFound(f"no run called {name} under {folder.absolute()}; runs there: {known}")
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
            "folder it was started in, or give --url and RUN"
        )
    return roots[0]
