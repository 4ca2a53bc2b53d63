"""`asyncrl bench NAME`: run a benchmark; the benchmarks are part of a source checkout, not of the package."""

from __future__ import annotations

import argparse
from typing import Any

from asyncrl.cli import checkout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    _benchmarks().add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns 1 when the measurement was stopped."""
    return int(_benchmarks().run(arguments))


def _benchmarks() -> Any:
    return checkout.load("benchmarks.command", "asyncrl bench")
