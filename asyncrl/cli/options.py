"""Options of commands: those with a value, and flags."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_option(
    parser: argparse._ActionsContainer,
    form: str,
    value: float | str | type[float | str | Path],
    about: str,
    dest: str | None = None,
) -> None:
    """Declare an option with a value; its help ends with the default, unless that is 0 or "".

    Args:
        form: its names and the name of the value: `--output FOLDER`.
        value: its default, or the type of a value that has none.
        about: if it names a default, none is added.
        dest: name among the arguments, if it differs from the option.
    """
    *names, metavar = form.split()
    kind, default = (value, None) if isinstance(value, type) else (type(value), value)
    known = default if isinstance(default, str) else f"{default:g}" if default else ""
    about += f" (default: {known})" if known and "default: " not in about else ""
    dest = dest or names[-1].removeprefix("--").replace("-", "_")
    parser.add_argument(*names, type=kind, default=default, metavar=metavar, help=about, dest=dest)


def add_flag(parser: argparse._ActionsContainer, name: str, about: str) -> None:
    """Declare an option without a value, which is off unless it is given."""
    parser.add_argument(name, action="store_true", help=about)
