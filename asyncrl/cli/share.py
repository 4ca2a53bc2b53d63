"""`asyncrl share`: several runs share the processes of a fleet by weight, for as long as this command runs."""

from __future__ import annotations

import argparse
import time
from fractions import Fraction

from asyncrl.cli.options import add_option
from asyncrl.cli.scale import read_counts
from asyncrl.cli.target import add_directory, add_server, add_wait, live_run
from asyncrl.errors import WrongUsage
from asyncrl.run.connect import FoundRun
from asyncrl.state.fleet_scheduler import Sharer, Sharing
from asyncrl.state.records import duration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", nargs="+", metavar="RUN=WEIGHT", help="such as base=0.7 tools=0.3")
    parser.add_argument(
        "--fleet",
        nargs="+",
        required=True,
        metavar="ROLE=COUNT",
        help="processes that the runs have together, such as engine=4 rollout=8",
    )
    add_option(
        parser,
        "--window SECONDS",
        60.0,
        "seconds over which shares hold within 5 points, where counts do not divide: the longer, the rarer a "
        "process moves",
    )
    add_directory(parser)
    add_server(parser)
    add_wait(parser, about="seconds for runs to be there at the beginning")


def run(arguments: argparse.Namespace) -> int:
    """Share until all runs are over."""
    import uvloop

    if not arguments.window > 0:
        raise WrongUsage(f"--window {arguments.window:g}: expected seconds above 0")
    sharing = Sharing(read_weights(arguments.weights), _counts(arguments.fleet), arguments.window, arguments.wait)
    began = time.monotonic()

    def find(name: str) -> FoundRun:
        return live_run(argparse.Namespace(**(vars(arguments) | {"run_id": name})))

    def report(line: str) -> None:
        print(f"{duration(time.monotonic() - began):>6}  {line}", flush=True)

    uvloop.run(Sharer(sharing, find, report).run())
    return 0


def read_weights(words: list[str]) -> dict[str, Fraction]:
    """`["base=0.7", "tools=0.3"]` as weights by run.

    Raises:
        WrongUsage: an argument is no RUN=WEIGHT, or there are not several runs.
    """
    weights = {}
    for word in words:
        name, _, text = word.rpartition("=")
        try:
            weight = Fraction(text)
        except (ValueError, ZeroDivisionError):
            weight = Fraction(0)
        if not name or weight <= 0:
            raise WrongUsage(f"{word!r}: expected RUN=WEIGHT with a number above 0, such as base=0.7")
        if name in weights:
            raise WrongUsage(f"run {name} is named twice; expected one weight for each")
        weights[name] = weight
    if len(weights) < 2:
        raise WrongUsage("one run shares with no other; name at least two, such as base=0.7 tools=0.3")
    return weights


def _counts(words: list[str]) -> dict[str, int]:
    counts = read_counts(words)
    for pool, count in counts.items():
        if not count:
            raise WrongUsage(f"{pool}=0: expected at least one process to share")
    return counts
