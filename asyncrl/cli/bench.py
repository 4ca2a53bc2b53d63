"""`asyncrl bench NAME`: run a benchmark; the benchmarks are part of a source checkout, not of the package."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from asyncrl.errors import WrongUsage

_CHECKOUT = Path(__file__).parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _benchmarks().add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns 1 when the measurement was stopped."""
    return int(_benchmarks().run(arguments))


def _benchmarks() -> Any:
    return from_checkout("benchmarks.command", "asyncrl bench")


def has_checkout() -> bool:
    """Return whether this program runs from a source checkout."""
    return (_CHECKOUT / "benchmarks" / "command.py").exists()


def from_checkout(module: str, command: str) -> Any:
    """Import a module of `benchmarks/`.

    Args:
        command: that needs it, for the error.

    Raises:
        WrongUsage: this is no source checkout.
    """
    if not has_checkout():
        raise WrongUsage(f"{command}: benchmarks are not installed with the package; run it from a source checkout")
    if str(_CHECKOUT) not in sys.path:
        sys.path.append(str(_CHECKOUT))
    return importlib.import_module(module)
