"""Output of commands: for people, or with `--json` for programs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import msgspec
from rich.console import Console, RenderableType

from asyncrl.cli.options import add_flag


def add_json(parser: argparse.ArgumentParser, about: str = "as one JSON object") -> None:
    """Declare `--json`."""
    add_flag(parser, "--json", about)


def show(arguments: argparse.Namespace, values: Any, text: Callable[[], RenderableType]) -> None:
    """Print a result as JSON where `--json` asks for it, else as text."""
    if arguments.json:
        print_json(values)
        return
    shown = text()
    print(shown) if isinstance(shown, str) else Console().print(shown)


def print_json(values: Any) -> None:
    """Print values as indented JSON."""
    print(msgspec.json.format(msgspec.json.encode(values)).decode())
