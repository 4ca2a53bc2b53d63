"""`asyncrl up`: start a run here and watch it."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

import msgspec

from asyncrl.bus.errors import BusError
from asyncrl.cast import CastError, load_cast
from asyncrl.cast_check import hints
from asyncrl.cli.launch import Launch, LaunchError
from asyncrl.cli.summary import summary_text


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("up", help="start a run and watch it")
    parser.add_argument("cast", nargs="?", default="demo", help="TOML file, or a shipped cast (default: demo)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting; repeatable"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Start, watch, and end the run; returns the exit code."""
    import uvloop

    try:
        launch = Launch(load_cast(arguments.cast, overrides=arguments.set, files=True))
        for hint in hints(launch.cast):
            print(f"hint: {hint}")
        launch.prepare()
    except (CastError, LaunchError) as error:
        print(error, file=sys.stderr)
        return 1
    return int(uvloop.run(_up(launch)))


async def _up(launch: Launch) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    code = 0
    try:
        bus = await launch.start()
        print(f"run {launch.cast.run} in {launch.files.root}", flush=True)
        ended = asyncio.create_task(launch.ended())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        code = ended.result() if ended.done() else 0
        await bus.close()
    except (BusError, LaunchError) as error:
        print(error, file=sys.stderr)
        code = 1
    finally:
        await launch.stop()
    summary = launch.files.root / "summary.json"
    if summary.exists():
        print(summary_text(msgspec.json.decode(summary.read_bytes())))
    if code:
        print(f"the run failed; see {launch.files.logs}", file=sys.stderr)
    return code
