"""`asyncrl stack`: what the threads of an actor do, also while its event loop is blocked."""

from __future__ import annotations

import argparse
import asyncio

from asyncrl.api.profiles import read_stack
from asyncrl.cli.logs import actor_of
from asyncrl.cli.target import add_run, live_run
from asyncrl.errors import AsyncRLError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "the live one", remote=False)
    parser.add_argument("actor", nargs="?", default="", metavar="ACTOR", help="such as rollout-2")


def run(arguments: argparse.Namespace) -> int:
    """Print the stacks."""
    actor_id = actor_of(arguments)
    try:
        text, path = asyncio.run(read_stack(live_run(arguments), actor_id))
    except TimeoutError:
        raise AsyncRLError(f"{actor_id} wrote no stack; is its process stopped? See `asyncrl doctor`") from None
    print(f"{text}\n{path}")
    return 0
