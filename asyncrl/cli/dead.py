"""`asyncrl dead`: list unreadable messages and prompts that killed worker after worker, and recover them."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from asyncrl.bus.connection import Bus
from asyncrl.cli.options import add_option
from asyncrl.cli.output import add_json, print_json, show
from asyncrl.cli.target import add_run, any_run, live_run, read_topics
from asyncrl.run.connect import FoundRun, connected
from asyncrl.state.dead_letters import letter_numbered, read_letters, reissue


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_json(parser, "as one JSON array")
    add_option(parser, "--show N", 0, "print dead letter N in full")
    parser.add_argument(
        "--reissue",
        nargs="+",
        default=[],
        metavar="NAME",
        help="issue again a prompt or trajectory that was dropped (p000042, p000042-3), or dead letter N",
    )


def run(arguments: argparse.Namespace) -> int:
    """List, show, or issue again."""
    if arguments.reissue:
        print("\n".join(asyncio.run(_reissue_all(live_run(arguments), arguments.reissue))))
    elif arguments.show:
        print_json(read_topics(any_run(arguments), "dead", lambda bus: _in_full(bus, arguments.show)))
    else:
        letters = read_topics(any_run(arguments), "dead", read_letters)
        figures = [letter.figures() for letter in letters]
        show(arguments, figures, lambda: "\n".join(map(str, letters)) or "no dead letters")
    return 0


async def _in_full(bus: Bus, number: int) -> dict[str, Any]:
    return await (await letter_numbered(bus, number)).in_full(bus)


async def _reissue_all(found: FoundRun, names: list[str]) -> list[str]:
    async with connected(found, "dead") as bus:
        return [await reissue(bus, name) for name in names]
