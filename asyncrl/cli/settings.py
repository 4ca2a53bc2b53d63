"""`asyncrl settings`: every setting with its type, range, default, unit and meaning."""

from __future__ import annotations

import argparse
import shutil

from asyncrl.config.reference import settings_json, settings_markdown, settings_text
from asyncrl.errors import WrongUsage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("prefix", nargs="?", default="", help="only those whose keys begin so, such as `learner.`")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON")
    form.add_argument("--markdown", action="store_true", help="as the text of docs/settings.md")


def run(arguments: argparse.Namespace) -> int:
    """Print the tree in the wanted form."""
    if arguments.json or arguments.markdown:
        text = settings_json() if arguments.json else settings_markdown()
    else:
        try:
            text = settings_text(arguments.prefix, shutil.get_terminal_size((100, 0)).columns)
        except LookupError as error:
            raise WrongUsage(str(error)) from error
    print(text.rstrip("\n"))
    return 0
