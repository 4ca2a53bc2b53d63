"""Options that several commands take."""

from __future__ import annotations

import argparse


def add_settings(parser: argparse.ArgumentParser, about: str = "override a setting; repeatable") -> None:
    """Declare `--set`."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=about)


def add_directory(parser: argparse.ArgumentParser) -> None:
    """Declare where runs are looked for."""
    parser.add_argument("--directory", default="runs", help="folder that holds the runs' directories (default: runs)")


def add_run(parser: argparse.ArgumentParser, *, positional: bool) -> None:
    """Declare how a command names a run."""
    about = "id or directory of the run (default: the newest live one)"
    if positional:
        parser.add_argument("run_id", nargs="?", default="", metavar="RUN", help=about)
    else:
        parser.add_argument("--run", dest="run_id", default="", metavar="RUN", help=about)
    add_directory(parser)
    parser.add_argument("--url", default="", help="NATS URL of a run that has no directory here; needs RUN")
    parser.add_argument("--user", default="", help="user name at that URL")
    parser.add_argument("--password-file", default="", help="file that holds the password")
    parser.add_argument(
        "--credentials", default="", metavar="FILE", help="who to be, such as runs/demo/credentials/monitor.json"
    )
