"""`asyncrl plan`: measure the engine and the trainer of a config alone, and propose devices, slots and batch."""

from __future__ import annotations

import argparse
import asyncio

from asyncrl.cli.options import add_option
from asyncrl.cli.output import add_json, show
from asyncrl.cli.target import add_config, add_settings, given_config
from asyncrl.config.load import load_config
from asyncrl.run.preflight import check_surroundings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "demo")
    add_settings(parser)
    add_option(parser, "--seconds SECONDS", 60.0, "length of the measurements, without starts")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, then print rates and settings."""
    from asyncrl.planning.plan import plan  # loads torch

    loaded = load_config(given_config(arguments), overrides=arguments.set, further=check_surroundings)
    found = asyncio.run(plan(loaded.config, loaded.base, arguments.seconds))
    show(arguments, found, found.text)
    return 0
