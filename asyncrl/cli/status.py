"""`asyncrl status`: what a run looks like now, from its topics."""

from __future__ import annotations

import argparse
import asyncio
import time

import msgspec
from rich.console import Console

from asyncrl.cli.find import find_directory, is_remote
from asyncrl.cli.options import add_run
from asyncrl.cli.reach import reached
from asyncrl.run.directory import is_locked
from asyncrl.state.run_state import RunState
from asyncrl.state.screen import render
from asyncrl.state.status import run_status
from asyncrl.state.watch import read_state


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Read the logs, print the picture."""
    state = asyncio.run(_read(arguments))
    now_ns = state.last_ns if state.over else time.time_ns()
    status = run_status(state, now_ns)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(status)).decode())
    else:
        Console().print(render(status))
    return 0


async def _read(arguments: argparse.Namespace) -> RunState:
    def is_gone() -> bool:
        return not is_remote(arguments) and not is_locked(find_directory(arguments, live=False))

    gone = is_gone()  # asked on both sides: a run that ends meanwhile stores its end behind what is read
    async with reached(arguments, "status") as bus:
        state = await read_state(bus)
    if gone and is_gone():
        state.on_gone()
    return state
