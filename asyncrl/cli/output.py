"""Output of commands: for people, or with `--json` for programs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from asyncrl.cli.options import add_flag
from asyncrl.telemetry.printable import PrintableOutput, printable


class Terminal(Console):
    """A console that writes the styles of its caller, and the control characters of texts as text."""

    def __init__(self, **options: Any) -> None:
        output = sys.stdout
        super().__init__(file=output.stream if isinstance(output, PrintableOutput) else output, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render with printable texts."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def add_json(parser: argparse.ArgumentParser, about: str = "as one JSON object") -> None:
    """Declare `--json`."""
    add_flag(parser, "--json", about)


def show(arguments: argparse.Namespace, values: Any, text: Callable[[], RenderableType]) -> None:
    """Print a result as JSON where `--json` asks for it, else as text."""
    if arguments.json:
        print_json(values)
        return
    shown = text()
    print(shown) if isinstance(shown, str) else Terminal().print(shown)


def print_json(values: Any) -> None:
    """Print values as indented JSON."""
    print(msgspec.json.format(msgspec.json.encode(values)).decode())
