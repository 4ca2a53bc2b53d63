"""`asyncrl top`: actors, engines, trajectories, waits, findings and logs of a live run, in a terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.live import Live

from asyncrl.background import first_of
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record
from asyncrl.cli.options import add_option
from asyncrl.cli.output import Terminal
from asyncrl.cli.target import add_run, live_run
from asyncrl.run.connect import FoundRun, connected
from asyncrl.state.published import follow_status
from asyncrl.state.top_rows import TABLES, Facts
from asyncrl.state.top_screen import TopScreen
from asyncrl.telemetry.logs import LogFile
from topics.actors import VITALS_TAKEN
from topics.runs import RunStatus
from topics.topic import VITALS

_REFRESH_S = 1.0
_FIRST_S = 3.0  # for the first state
_TAIL_BYTES = 65536  # of each log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "the live one")
    parser.add_argument("--table", choices=TABLES, default="actors", help="table at the start (default: actors)")
    add_option(parser, "--filter TEXT", "", "show only rows with this text")


def run(arguments: argparse.Namespace) -> int:
    """Show the run until `q`; print one picture where the output is no terminal."""
    import uvloop

    uvloop.run(_watch(live_run(arguments), TopScreen(Facts(), arguments.table, arguments.filter)))
    return 0


async def _watch(found: FoundRun, screen: TopScreen) -> None:
    async with connected(found, "top") as bus:
        news = asyncio.Event()

        def take(status: RunStatus) -> None:
            screen.facts.status = status
            news.set()

        listener = await follow_status(bus, take)
        reader = await _follow_vitals(bus, screen.facts)
        logs = _Logs(found)
        try:
            await first_of(news.wait(), timeout_s=_FIRST_S)
            if not sys.stdout.isatty():
                logs.read(screen.facts)
                console = Terminal()
                console.print(screen.render(console.width, console.height))
                return
            await _draw(screen, logs, news)
        finally:
            await listener.close()
            await reader.close()


async def _follow_vitals(bus: Bus, facts: Facts) -> LogReader:
    def take(record: Record) -> None:
        facts.take_vitals(record.key, record.data)

    reader = LogReader(bus, VITALS, take, subjects=[VITALS_TAKEN.pattern(bus.run)], newest=True)
    await reader.start()
    return reader


async def _draw(screen: TopScreen, logs: _Logs, news: asyncio.Event) -> None:
    """Draw once a second, and after each key."""
    console, pressed = Terminal(), asyncio.Event()

    def press(key: str) -> None:
        screen.press(key)
        pressed.set()

    with _keys(press), Live(console=console, screen=True, auto_refresh=False) as live:
        while not screen.closed:
            if screen.table == "logs":
                logs.read(screen.facts)
            live.update(screen.render(console.width, console.height), refresh=True)
            pressed.clear()
            await first_of(pressed.wait(), timeout_s=_REFRESH_S)


class _Logs:
    """The logs of a run whose directory is here, read from near their ends on."""

    def __init__(self, found: FoundRun) -> None:
        self._folder = found.files.logs if found.root is not None else None
        self._files: dict[Path, LogFile] = {}

    def read(self, facts: Facts) -> None:
        """Add the new lines of all actors, in the order of time."""
        for path in self._folder.glob("*.log") if self._folder is not None else ():
            if path not in self._files:
                self._files[path] = LogFile(path, newest_bytes=_TAIL_BYTES)
        lines = [line for file in self._files.values() for line in file.read()]
        facts.lines.extend(sorted(lines, key=lambda line: line.time))


@contextlib.contextmanager
def _keys(press: Callable[[str], None]) -> Iterator[None]:
    """Hand over each key that is pressed in the terminal, escape sequences whole."""
    if not sys.stdin.isatty():
        yield
        return
    number, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(number)

    def take() -> None:
        text = os.read(number, 64).decode(errors="replace")
        for key in [text] if text.startswith("\x1b") else text:
            press(key)

    tty.setcbreak(number)
    loop.add_reader(number, take)
    try:
        yield
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)
