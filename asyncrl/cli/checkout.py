"""Modules that are part of a source checkout, not of the package: benchmarks and chaos campaigns."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from asyncrl.errors import WrongUsage

_CHECKOUT = Path(__file__).parents[2]


def has_checkout() -> bool:
    """Return whether this program runs from a source checkout."""
    return (_CHECKOUT / "benchmarks" / "command.py").exists()


def load(module: str, command: str) -> Any:
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
