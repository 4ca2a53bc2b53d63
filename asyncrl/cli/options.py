"""Options that several commands take."""

from __future__ import annotations

import argparse


def add_settings(parser: argparse.ArgumentParser, about: str = "override a setting; repeatable") -> None:
    """Declare `--set`."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=about)


def add_directory(parser: argparse.ArgumentParser) -> None:
    """Declare where runs are looked for."""
    parser.add_argument("--directory", default="runs", help="folder that holds the runs' directories (default: runs)")


def add_run_name(parser: argparse.ArgumentParser, about: str) -> None:
    """Declare RUN, always the first argument of a command, and where runs are looked for."""
    parser.add_argument("run_id", nargs="?", default="", metavar="RUN", help=about)
    add_directory(parser)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Declare how a command names a run and reaches it; further arguments of the command are declared after it."""
    add_run_name(parser, "id or directory of the run (default: the live one)")
    add_server(parser)


def add_server(parser: argparse.ArgumentParser) -> None:
    """Declare how a command reaches a server whose runs have no directory here."""
    parser.add_argument("--url", default="", help="NATS URL of a run that has no directory here; needs RUN")
    parser.add_argument("--user", default="", help="user name at that URL")
    parser.add_argument("--password-file", default="", help="file that holds the password")
    parser.add_argument(
        "--credentials",
        default="",
        metavar="FILE",
        help="file with the login, such as runs/demo/credentials/monitor.json",
    )
    parser.add_argument(
        "--tls-ca", default="", metavar="FILE", help="certificates that sign the server's, where the system has none"
    )
