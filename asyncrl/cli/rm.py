"""`asyncrl rm`: remove runs that are over: their directories here, their topics on a server."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from asyncrl.cli.options import add_flag
from asyncrl.cli.target import add_directory, add_server, given_login
from asyncrl.run.connect import FoundRun
from asyncrl.run.remove import remove_directory, remove_topics
from asyncrl.state.records import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_ids", nargs="+", metavar="RUN", help="ids or directories of runs that are over")
    add_directory(parser)
    add_server(parser)
    add_flag(parser, "--force", "also remove topics of a run that was moved, or whose supervisor died and left them")


def run(arguments: argparse.Namespace) -> int:
    """Remove each, and print the removed parts."""
    login = given_login(arguments)
    for name in arguments.run_ids:
        if login is not None:
            count = asyncio.run(remove_topics(FoundRun(name, None, login), force=arguments.force))
            print(f"run {name}: {counted(count, 'stream')} removed from {login.url}")
        else:
            print(remove_directory(Path(arguments.directory), name, force=arguments.force))
    return 0
