"""`asyncrl status`: what a run looks like now, from its topics."""

from __future__ import annotations

import argparse
import time

from asyncrl.cli.output import add_json, show
from asyncrl.cli.target import add_run, any_run, read_topics
from asyncrl.state.screen import render
from asyncrl.state.status import run_status
from asyncrl.state.watch import read_state


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Read the logs, print the picture."""
    found = any_run(arguments)
    held = found.is_held  # asked before and after: an ending run stores its end after the messages that were read
    state = read_topics(found, "status", read_state)
    if not (held or found.is_held):
        state.on_gone()
    now_ns = state.last_ns if state.over else time.time_ns()
    status = run_status(state, now_ns)
    show(arguments, status, lambda: render(status))
    return 0
