"""`asyncrl web`: show a run in a browser."""

from __future__ import annotations

import argparse
import signal

from asyncrl.cli.options import add_option
from asyncrl.cli.target import add_run, live_run, read_topics
from asyncrl.errors import WrongUsage
from asyncrl.page.serve import ROLES, served_page
from asyncrl.run.connect import run_ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_option(parser, "--role ROLE", ROLES[0], "login of the page: monitor (everything), or observer (no texts)")
    add_option(parser, "--port PORT", 0, "port of the page on loopback (default: any free one)")


def run(arguments: argparse.Namespace) -> int:
    """Serve the page until the run has ended, or an interrupt."""
    if arguments.role not in ROLES:
        raise WrongUsage(f"--role {arguments.role}: expected {' or '.join(ROLES)}")
    found = live_run(arguments)
    try:
        with served_page(found, arguments.role, arguments.port) as url:
            print(f"run {found.run}: {url}\nthe URL has the login of the {arguments.role}; Ctrl-C ends", flush=True)
            if found.root is None:  # not every login there may read how the run ends; the page shows the state
                signal.pause()
            else:
                read_topics(found, "web", run_ended)
    except KeyboardInterrupt:
        return 130
    print(f"run {found.run} has ended; its page with all data: asyncrl report {found.run}")
    return 0
