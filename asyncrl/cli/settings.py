"""`asyncrl settings`: every setting with its type, range, default, unit and meaning."""

from __future__ import annotations

import argparse
import shutil

from asyncrl.cli.options import add_flag
from asyncrl.cli.output import print_json
from asyncrl.config.reference import documented_tables, settings_markdown, settings_text
from asyncrl.errors import WrongUsage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prefix", nargs="?", default="", help="only settings that begin with this, such as `learner.`")
    form = parser.add_mutually_exclusive_group()
    add_flag(form, "--json", "as JSON")
    add_flag(form, "--markdown", "as the text of docs/reference/settings.md")


def run(arguments: argparse.Namespace) -> int:
    """Print the tree in the wanted form."""
    if arguments.json:
        print_json(list(documented_tables()))
    elif arguments.markdown:
        print(settings_markdown().rstrip("\n"))
    else:
        try:
            print(settings_text(arguments.prefix, shutil.get_terminal_size((100, 0)).columns).rstrip("\n"))
        except LookupError as error:
            raise WrongUsage(str(error)) from error
    return 0
