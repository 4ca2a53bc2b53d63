"""`asyncrl tap`: print a run's messages when they are published; messages that could not be shown are counted."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Iterable
from typing import Any

from asyncrl.background import first_of
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record
from asyncrl.cli.options import add_flag, add_option
from asyncrl.cli.output import Terminal
from asyncrl.cli.target import add_run, any_run, live_run, tables_of
from asyncrl.errors import WrongUsage
from asyncrl.run.connect import connected, is_over, opened, run_ended
from asyncrl.state.format_message import FormattedMessage, as_json, as_line
from asyncrl.state.live_tap import Condition, LiveTap, Pattern, read_condition
from asyncrl.state.records import counted

_REPORT_S = 1.0  # between two reports of missed messages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "the live one")
    parser.add_argument(
        "pattern", help="topic, with `*` for any part and an optional key: 'trajectory.*', '*.trained', '*'"
    )
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="show messages whose field (a.b) or header has this value; repeatable",
    )
    add_flag(parser, "--json", "print one JSON object per line, with whole arrays")
    add_option(parser, "--count N", 0, "end after N messages")
    add_flag(parser, "--from-start", "read the logs from their beginning, also of a run that is over")
    add_flag(parser, "--no-follow", "with --from-start: stop at the present end of the logs")


def run(arguments: argparse.Namespace) -> int:
    """Listen until interrupted, until N messages were shown, or until the run ends."""
    pattern = Pattern(arguments.pattern, tables_of(arguments))
    conditions = [read_condition(word) for word in arguments.where]
    printer = _Printer(conditions, arguments.json, arguments.count)
    if arguments.no_follow and not arguments.from_start:
        raise WrongUsage("--no-follow goes with --from-start: it ends where the logs end now")
    pattern.check_conditions(conditions)
    asyncio.run(_tap(arguments, pattern, printer))
    if printer.fault is not None:
        raise printer.fault
    return 0


class _Printer:
    """Prints what meets the conditions, until it was enough."""

    def __init__(self, conditions: list[Condition], json: bool, most: int) -> None:
        self._conditions = conditions
        self._json = json
        self._most = most
        self._lines = Terminal().file  # they are printable, and have escape sequences for colours
        self._colour = self._lines.isatty()
        self.shown = 0
        self.fault: BrokenPipeError | None = None

    @property
    def enough(self) -> bool:
        """Return whether nothing more is wanted."""
        return self.fault is not None or (self._most > 0 and self.shown >= self._most)

    def show(self, formatted: Iterable[FormattedMessage]) -> None:
        """Print those that are wanted."""
        for one in formatted:
            if self.enough:
                return
            if all(condition.holds(one) for condition in self._conditions):
                try:
                    if self._json:
                        print(as_json(one), flush=True)
                    else:
                        print(as_line(one, colour=self._colour), file=self._lines, flush=True)
                except BrokenPipeError as error:
                    self.fault = error
                    return
                self.shown += 1


async def _tap(arguments: argparse.Namespace, pattern: Pattern, printer: _Printer) -> None:
    stop, from_start = _on_interrupt(), arguments.from_start
    async with opened(any_run(arguments), "tap") if from_start else connected(live_run(arguments), "tap") as bus:
        waits: set[asyncio.Task[Any]] = {asyncio.create_task(stop.wait())}
        follow = not (arguments.no_follow or (from_start and await is_over(bus)))
        if follow:
            waits.add(asyncio.create_task(run_ended(bus)))
        try:
            if from_start:
                await _read_logs(bus, pattern, printer, stop, waits, follow=follow)
            else:
                await _listen(bus, pattern, printer, stop, waits)
        finally:
            for wait in waits:
                wait.cancel()


def _on_interrupt() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _listen(
    bus: Bus, pattern: Pattern, printer: _Printer, stop: asyncio.Event, waits: set[asyncio.Task[Any]]
) -> None:
    tap = LiveTap(bus, pattern)
    await tap.start()
    reported, reported_at = 0, float("-inf")
    while not (printer.enough or stop.is_set()):
        if tap.waiting:
            # In a thread: while the reader of our output is slow, messages are still received and counted.
            await asyncio.to_thread(printer.show, tap.take())
        elif any(wait.done() for wait in waits):
            print(f"run {bus.run} has ended", file=sys.stderr)
            break
        else:
            await first_of(tap.news(), *waits)
        if tap.missed > reported and time.monotonic() - reported_at >= _REPORT_S:
            print(
                f"missed {counted(tap.missed, 'message')} so far: they come faster than they are read", file=sys.stderr
            )
            reported, reported_at = tap.missed, time.monotonic()
    await tap.close()
    print(f"{printer.shown:,} shown, {tap.missed:,} missed", file=sys.stderr)


async def _read_logs(
    bus: Bus, pattern: Pattern, printer: _Printer, stop: asyncio.Event, waits: set[asyncio.Task[Any]], *, follow: bool
) -> None:
    """Read one log after the other to its current end, then, to `follow`, all of them as they grow."""

    def on_record(record: Record) -> None:
        if pattern.matches(record.subject):
            printer.show([FormattedMessage.of_record(record, bus.tables)])
            if printer.enough:
                stop.set()

    streams = [stream for stream in bus.tables.streams if pattern.concerns(stream) and not stream.closed]
    readers = [LogReader(bus, stream, on_record) for stream in streams]
    for reader in readers:
        await reader.start()
        await first_of(reader.caught_up.wait(), *waits)
    if follow:
        await first_of(*waits)
    for reader in readers:
        await reader.close()
    print(f"{printer.shown:,} shown, 0 missed", file=sys.stderr)
