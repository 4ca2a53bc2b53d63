"""`asyncrl COMMAND`: one file per command, each imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = ("up", "check", "settings")


def main() -> int:
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser(prog="asyncrl", description="Asynchronous RL for language models, over topics.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    for name in [asked] if asked in COMMANDS else COMMANDS:
        importlib.import_module(f"asyncrl.cli.{name}").add_parser(subparsers)
    arguments = parser.parse_args()
    return int(arguments.run(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
