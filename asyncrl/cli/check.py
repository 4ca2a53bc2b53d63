"""`asyncrl check`: every problem of a config at once, before anything starts."""

from __future__ import annotations

import argparse

from asyncrl.api.check import check
from asyncrl.cli.target import add_config, add_settings, given_config
from asyncrl.config.load import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "demo")
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print `ok`, hints, stop tokens, rewards of labels, estimates of memory, and the room for streams."""
    found = check(given_config(arguments), arguments.set)
    if not found.ok:
        raise ConfigError(found.source, found.problems)
    print(found)
    return 0
