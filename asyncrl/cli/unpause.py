"""`asyncrl unpause`: train again after an alert paused the run."""

from __future__ import annotations

import argparse
import asyncio

from asyncrl.api.requests import unpause
from asyncrl.cli.target import add_run, add_wait, live_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "the live one")
    add_wait(parser)


def run(arguments: argparse.Namespace) -> int:
    """Answer the alert that paused the run."""
    found = live_run(arguments)
    alert = asyncio.run(unpause(found, arguments.wait))
    print(f"run {found.run} trains again; alert {alert} had paused it")
    return 0
