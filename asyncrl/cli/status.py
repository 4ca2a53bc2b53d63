"""`asyncrl status`: what a run looks like now, from its topics."""

from __future__ import annotations

import argparse
import asyncio

from asyncrl.api.status import read_status
from asyncrl.cli.output import add_json, show
from asyncrl.cli.target import add_run, any_run
from asyncrl.state.screen import render


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the state of the run."""
    status = asyncio.run(read_status(any_run(arguments)))
    show(arguments, status, lambda: render(status))
    return 0
