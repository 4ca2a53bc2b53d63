"""`asyncrl logs`: what the actors of a run wrote down, in the order of time."""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from datetime import datetime
from pathlib import Path

from rich.text import Text

from asyncrl.cli.options import add_flag
from asyncrl.cli.output import Terminal
from asyncrl.cli.target import add_run, any_run, tell_apart
from asyncrl.errors import AsyncRLError, WrongUsage
from asyncrl.run.connect import FoundRun
from asyncrl.telemetry.logs import Line, LogFile
from asyncrl.telemetry.printable import printable
from topics.roles import pool_of, role_of

LEVELS = ("debug", "info", "warning", "error", "critical")
_POLL_S = 0.3
_STYLES = {"debug": "dim", "info": "green", "warning": "yellow", "error": "bold red", "critical": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, remote=False)
    parser.add_argument("actor", nargs="?", default="", metavar="ACTOR", help="actor or role (default: all)")
    add_flag(parser, "--follow", "keep printing until the run ends")
    parser.add_argument("--level", choices=LEVELS, default="info", help="print this level and above (default: info)")


def run(arguments: argparse.Namespace) -> int:
    """Print, and follow if asked to."""
    tell_apart(arguments, "actor", _actors_and_roles)
    found = any_run(arguments)
    logs = found.files.logs
    files: dict[Path, LogFile] = {}
    _open_new(logs, arguments.actor, files)
    if not files:
        raise AsyncRLError(_no_log(found, arguments.actor))
    console = Terminal(soft_wrap=True, highlight=False)
    first = True
    while True:
        over = not found.is_held  # asked before reading: what comes after it is read once more
        lines = sorted((line for file in files.values() for line in file.read()), key=lambda line: line.time)
        shown = [line for line in lines if _is_shown(line, arguments.level)]
        for line in shown:
            console.print(line_text(line))
        if first and not shown:
            yet = " yet" * (arguments.follow and not over)
            who = arguments.actor or "any actor"
            print(f"run {found.run}: {_nothing(lines, arguments.level)} was logged by {who}{yet}", file=sys.stderr)
        first = False
        if not arguments.follow or over:
            return 0
        threading.Event().wait(_POLL_S)  # no event announces that a file grew
        _open_new(logs, arguments.actor, files)


def _no_log(found: FoundRun, actor: str) -> str:
    known = ", ".join(sorted(path.name.removesuffix(".log") for path in found.files.logs.glob("*.log"))) or "none"
    return f"run {found.run} has no log of {actor or 'any actor'}; there are: {known}"


def _actors_and_roles(found: FoundRun) -> set[str]:
    logged = {path.name.split(".")[0] for path in found.files.logs.glob("*.log")}
    return {*logged, *map(role_of, logged)}


def actor_of(arguments: argparse.Namespace) -> str:
    """Return the one actor that a command about a live run names; a role means its first one.

    Raises:
        WrongUsage: it names none.
    """
    tell_apart(arguments, "actor", _actors_and_roles, live=True)
    name: str = arguments.actor
    if not name:
        raise WrongUsage(f"name an actor: {arguments.parser.prog} [RUN] ACTOR")
    return name if name.rpartition("-")[2].isdigit() else f"{name}-1"


def line_text(line: Line) -> Text:
    """`09:47:18.944 supervisor-1 fleet scaled  learner=1`, with the time of this machine's zone."""
    clock = datetime.fromisoformat(line.time).astimezone().strftime("%H:%M:%S.%f")[:-3] if line.time else " " * 12
    text = Text(f"{clock} ", style="dim").append(f"{line.actor:<12} ", style="cyan not dim")
    if line.level != "info":
        text.append(f"{line.level} ", style=f"{_STYLES.get(line.level, '')} not dim")
    text.append(printable(line.event), style="not dim bold" if line.fields else "not dim")
    trace = printable(str(line.fields.get("exception", "")))
    fields = printable(" ".join(f"{name}={value}" for name, value in line.fields.items() if name != "exception"))
    if fields:
        text.append(f"  {fields}", style="not dim")
    return text.append(f"\n{trace}") if trace else text


def _open_new(logs: Path, actor: str, files: dict[Path, LogFile]) -> None:
    for path in sorted(logs.glob("*.log")):
        name = path.name.split(".")[0]
        if path not in files and (not actor or actor in (name, pool_of(name), role_of(name))):
            files[path] = LogFile(path)


def _is_shown(line: Line, level: str) -> bool:
    return line.level not in LEVELS or LEVELS.index(line.level) >= LEVELS.index(level)


def _nothing(lines: list[Line], level: str) -> str:
    """Name the missing actors, and count the hidden lines of lower levels."""
    counts = Counter(line.level for line in lines)
    below = ", ".join(f"{counts[name]:,} of level {name}" for name in LEVELS if counts[name])
    return f"nothing of level {level} or above, but {below}," if below else "nothing"
