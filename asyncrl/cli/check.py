"""`asyncrl check`: every problem of a cast at once, before anything starts."""

from __future__ import annotations

import argparse

from asyncrl.cast import load_cast
from asyncrl.cast_check import hints
from asyncrl.cli.options import add_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("cast", nargs="?", default="demo", help="TOML file, or a shipped cast (default: demo)")
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print `ok` with hints, where there is no problem."""
    loaded = load_cast(arguments.cast, overrides=arguments.set, files=True)
    print("ok")
    for hint in hints(loaded.cast):
        print(f"hint: {hint}")
    return 0
