"""Placement of the processes of a run: on this machine, or wherever another placement has room."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple, Protocol

from asyncrl.config.process_settings import placement_kind
from asyncrl.config.settings import Config
from asyncrl.errors import AsyncRLError
from asyncrl.run.directory import RunFiles


class Job(NamedTuple):
    """A process to be started: `python -m MODULE WORDS`."""

    name: str  # of its log: "rollout-2"
    module: str
    words: tuple[str, ...] = ()
    credentials: Path | None = None  # file that follows as `--credentials FILE`; it holds a secret
    environment: Mapping[str, str] = {}
    apart: bool = False  # Ctrl-C in the terminal is not for it
    inherits: tuple[int, ...] = ()  # file descriptors that stay open in it


class NoRoom(AsyncRLError):
    """No host has room for a process now; the message names its needs, and its start may be tried again."""


LOST = -256  # exit code of a process whose host is lost: no signal has this number


class Placed(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int:
        """Its number on its host."""

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for the signal that ended it, or `LOST`; None while it lives."""

    @property
    def end_text(self) -> str:
        """Describe how it ended, with the last lines of its log."""

    async def wait(self) -> int:
        """Wait until it has ended; returns its exit code."""

    def terminate(self) -> None:
        """Ask it to leave; one that has ended is no error."""

    def kill(self) -> None:
        """End it at once, even if it is stopped; an ended one is no error."""


class Placement(Protocol):
    """A place for processes. All that it started end with the process that holds it."""

    async def start(self, job: Job) -> Placed:
        """Start a process.

        Raises:
            NoRoom: no host has room for it now.
            OSError: it could not be started.
            AsyncRLError: its host is gone; if the error is fatal, another start would not help.
        """

    def here(self, job: Job) -> bool:
        """Return whether a process runs on this machine, which starts few at a time."""

    def log(self, name: str) -> Path:
        """The file that holds what the processes of this name printed."""

    @property
    def away_s(self) -> float:
        """Seconds without an answer from the service that reaches other hosts; 0 if it answers."""


def open_placement(config: Config, files: RunFiles) -> Placement:
    """Open the placement that the settings name."""
    placement: Placement = resolve_name(placement_kind(config.placement.kind).opener)(config, files)
    return placement


def actor_job(credentials: Path, run: str, role: str, actor_id: str, *, apart: bool = False) -> Job:
    """Return the process of an actor.

    Args:
        credentials: folder with one file per role.
    """
    words = (role, actor_id, "--run", run)
    return Job(actor_id, "actors.main", words, credentials / f"{role}.json", apart=apart)
