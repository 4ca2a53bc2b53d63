"""`asyncrl check`: every problem of a cast at once, before anything starts."""

from __future__ import annotations

import argparse
import sys

from asyncrl.cast import CastError, load_cast
from asyncrl.cast_check import hints


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("check", help="name every problem of a cast, without starting anything")
    parser.add_argument("cast", nargs="?", default="demo", help="TOML file, or a shipped cast (default: demo)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting; repeatable"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the problems and return 1, or `ok` with hints and return 0."""
    try:
        loaded = load_cast(arguments.cast, overrides=arguments.set, files=True)
    except CastError as error:
        print(error, file=sys.stderr)
        return 1
    print("ok")
    for hint in hints(loaded.cast):
        print(f"hint: {hint}")
    return 0
