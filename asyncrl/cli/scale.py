"""`asyncrl scale`: more or fewer processes of a role, during the run."""

from __future__ import annotations

import argparse
import asyncio

from asyncrl.api.requests import check_count, scale
from asyncrl.cli.target import add_run, add_wait, live_run
from asyncrl.errors import WrongUsage
from topics.roles import pool_named
from topics.table import BUILT_IN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "the live one")
    roles = ", ".join(BUILT_IN.scalable)
    about = f"such as rollout=4, rollout.NAME=4 for a pool, or engine.NAME=2 for a group of engines; roles: {roles}"
    parser.add_argument("counts", nargs="*", metavar="ROLE=COUNT", help=about)
    add_wait(parser)


def run(arguments: argparse.Namespace) -> int:
    """Request, wait until as many live, report."""
    if "=" in arguments.run_id:  # the first count, if no run is named
        arguments.counts, arguments.run_id = [arguments.run_id, *arguments.counts], ""
    if not arguments.counts:
        raise WrongUsage("how many processes of which role? For example: asyncrl scale rollout=4")
    wanted = read_counts(arguments.counts)
    asyncio.run(scale(live_run(arguments), wanted, arguments.wait))
    print("scaled: " + ", ".join(f"{role} {count}" for role, count in wanted.items()))
    return 0


def read_counts(words: list[str]) -> dict[str, int]:
    """`["rollout=4"]` as `{"rollout": 4}`.

    Raises:
        WrongUsage: an argument is no ROLE=COUNT of a role that can be scaled.
    """
    wanted = {}
    for word in words:
        role, sign, count = word.partition("=")
        if not sign:
            raise WrongUsage(f"{word!r}: expected ROLE=COUNT, such as rollout=4")
        role = pool_named(role)
        check_count(role, int(count) if count.isdecimal() else count, BUILT_IN)
        wanted[role] = int(count)
    return wanted
