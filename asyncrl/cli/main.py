"""`asyncrl COMMAND`: one file per command, each imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from importlib.metadata import version

COMMANDS = (
    "up",
    "status",
    "down",
    "doctor",
    "scale",
    "tap",
    "logs",
    "audit",
    "explain",
    "dead",
    "replay",
    "fork",
    "topics",
    "roles",
    "check",
    "settings",
    "chaos",
    "bench",
)
_EXAMPLES = """\
examples:
  asyncrl up                              run the demo here and watch it
  asyncrl up my.toml --set learner.lr=1e-5
  asyncrl status                          from any other terminal
  asyncrl scale rollout=4 reward=2
  asyncrl tap 'trajectory.graded' --where reward=1.0

`asyncrl COMMAND --help` says more about one command.
"""


def main() -> int:
    """Parse the command line and run the command; returns 0 for success, 1 for failure, 2 for wrong usage."""
    try:
        arguments = _parser(sys.argv[1:]).parse_args()
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Nothing may be written any more, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _parser(words: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl",
        description="Asynchronous reinforcement learning for language models: actors that talk only through topics.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"asyncrl {version('asyncrl')}")
    parser.set_defaults(run=_print_help, parser=parser)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    asked = next((word for word in words if not word.startswith("-")), "")
    for name in [asked] if asked in COMMANDS else COMMANDS:
        importlib.import_module(f"asyncrl.cli.{name}").add_parser(subparsers)
    return parser


def _print_help(arguments: argparse.Namespace) -> int:
    arguments.parser.print_help()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
