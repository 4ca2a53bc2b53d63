"""`asyncrl logs`: what the actors of a run wrote down, in the order of time."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.text import Text

from asyncrl.cli.target import add_run, any_run
from asyncrl.errors import AsyncRLError
from topics.roles import ROLE_NAMES

LEVELS = ("debug", "info", "warning", "error", "critical")
_LOOK_S = 0.3
_STYLES = {"debug": "dim", "info": "green", "warning": "yellow", "error": "bold red", "critical": "bold red"}


class Line(NamedTuple):
    """One line of an actor's log."""

    time: str  # ISO 8601 in UTC; that of the line before where it has none of its own
    actor: str
    level: str
    event: str
    fields: dict[str, Any]


class LogFile:
    """The log of one actor, read as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.actor = path.name.removesuffix(".log")
        self._at = 0
        self._time = ""

    def read(self) -> list[Line]:
        """The whole lines that came since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return [self._line(raw) for raw in whole.decode(errors="replace").splitlines() if raw.strip()]

    def _line(self, raw: str) -> Line:
        try:
            fields = msgspec.json.decode(raw, type=dict[str, Any])
        except msgspec.MsgspecError:
            return Line(self._time, self.actor, "info", raw.rstrip(), {})  # the log lines of libraries
        self._time = str(fields.pop("timestamp", self._time))
        fields.pop("actor", None)
        return Line(self._time, self.actor, str(fields.pop("level", "info")), str(fields.pop("event", "")), fields)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_run(parser, "the live one, else the newest", remote=False)
    parser.add_argument("actor", nargs="?", default="", metavar="ACTOR", help="actor or role (default: all)")
    parser.add_argument("--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("--level", choices=LEVELS, default="info", help="this level and above (default: info)")


def run(arguments: argparse.Namespace) -> int:
    """Print, and follow if asked to."""
    word = arguments.run_id
    if not arguments.actor and (
        word in ROLE_NAMES or word.rpartition("-")[0] in ROLE_NAMES
    ):  # an actor, where no run is named
        arguments.actor, arguments.run_id = word, ""
    found = any_run(arguments)
    logs = found.files.logs
    files: dict[Path, LogFile] = {}
    if not _open_new(logs, arguments.actor, files):
        known = ", ".join(sorted(path.name.removesuffix(".log") for path in logs.glob("*.log"))) or "none"
        raise AsyncRLError(f"run {found.run} has no log of {arguments.actor or 'anybody'}; there are: {known}")
    console = Console(soft_wrap=True, highlight=False)
    while True:
        over = not found.is_held  # asked before reading: what comes after it is read once more
        lines = _merged(files.values())
        _print(console, lines, arguments.level)
        if not arguments.follow and not lines:
            print(f"run {found.run}: nothing was logged by {arguments.actor or 'any actor'}", file=sys.stderr)
        if not arguments.follow or over:
            return 0
        threading.Event().wait(_LOOK_S)  # no event announces that a file grew
        _open_new(logs, arguments.actor, files)


def line_text(line: Line) -> Text:
    """`09:47:18.944 supervisor-1 fleet scaled  learner=1`, with the time of this machine's zone."""
    clock = datetime.fromisoformat(line.time).astimezone().strftime("%H:%M:%S.%f")[:-3] if line.time else " " * 12
    text = Text(f"{clock} ", style="dim").append(f"{line.actor:<12} ", style="cyan not dim")
    if line.level != "info":
        text.append(f"{line.level} ", style=f"{_STYLES.get(line.level, '')} not dim")
    text.append(line.event, style="not dim bold" if line.fields else "not dim")
    trace = line.fields.get("exception", "")
    fields = " ".join(f"{name}={value}" for name, value in line.fields.items() if name != "exception")
    if fields:
        text.append(f"  {fields}", style="not dim")
    return text.append(f"\n{trace}") if trace else text


def _open_new(logs: Path, actor: str, files: dict[Path, LogFile]) -> bool:
    for path in sorted(logs.glob("*.log")):
        name = path.name.split(".")[0]
        if path not in files and (not actor or actor in (name, name.rpartition("-")[0])):
            files[path] = LogFile(path)
    return bool(files)


def _merged(files: Iterable[LogFile]) -> list[Line]:
    return sorted((line for file in files for line in file.read()), key=lambda line: line.time)


def _print(console: Console, lines: list[Line], level: str) -> None:
    lowest = LEVELS.index(level)
    for line in lines:
        if line.level not in LEVELS or LEVELS.index(line.level) >= lowest:
            console.print(line_text(line))
