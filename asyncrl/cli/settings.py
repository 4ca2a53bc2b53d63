"""`asyncrl settings`: every setting with its type, range, default, unit and meaning."""

from __future__ import annotations

import argparse

from asyncrl.config.reference import settings_json, settings_markdown, settings_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON")
    form.add_argument("--markdown", action="store_true", help="as the text of docs/settings.md")


def run(arguments: argparse.Namespace) -> int:
    """Print the tree in the wanted form."""
    text = settings_json() if arguments.json else settings_markdown() if arguments.markdown else settings_text()
    print(text.rstrip("\n"))
    return 0
