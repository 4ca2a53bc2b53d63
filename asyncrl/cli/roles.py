"""`asyncrl roles`: what each role may publish and subscribe to, and the users that an external server needs for it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from asyncrl.bus.address import BusAddress
from asyncrl.bus.logins import DEFAULT_URL, numbered, write_accounts
from asyncrl.bus.permissions import login_roles, permissions, user_of
from asyncrl.cli.options import add_flag, add_option
from asyncrl.config.load import load_config
from asyncrl.errors import AsyncRLError, WrongUsage
from asyncrl.run.user_actors import run_tables
from topics.table import BUILT_IN, Tables

_RUN = re.compile(r"[a-z0-9-]{1,32}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", default=["run"], metavar="RUN", help="ids of runs (default: run)")
    about = "with each RUN also RUN-2 to RUN-N, as `asyncrl up` names the next runs of a config"
    add_option(parser, "--runs N", 1, about, "count")
    add_option(
        parser,
        "--config FOLDER",
        "",
        "make users that serve all these runs, FOLDER/nats-accounts.conf and FOLDER/ROLE.json, or let those that "
        "are there serve them too",
    )
    add_option(parser, "--actors CONFIG", "", "include the actors and the pools of this config")
    add_option(parser, "--url URL", "", f"server that these users log in to (at first: {DEFAULT_URL})")
    add_option(parser, "--tls-ca FILE", "", "certificates of the authority of that server, in PEM")
    add_option(parser, "--domain DOMAIN", "", "JetStream domain that has the streams, if leaf nodes connect several")
    add_flag(parser, "--rotate", "give existing users new passwords")


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or write the files."""
    runs = [name for first in arguments.runs for name in islice(numbered(first), max(1, arguments.count))]
    for name in runs:
        if _RUN.fullmatch(name) is None:
            raise WrongUsage(f"{name!r} is no id of a run; expected 1 to 32 of a-z, 0-9 and -")
    tables = BUILT_IN
    if arguments.actors:
        loaded = load_config(arguments.actors)
        tables = run_tables(loaded.config, loaded.base)
    if not arguments.config:
        print(roles_text(runs, tables))
        return 0
    folder = Path(arguments.config)
    there = (folder / "monitor.json").exists()
    try:
        tls_ca = Path(arguments.tls_ca).read_text(encoding="ascii") if arguments.tls_ca else ""
        server = BusAddress(arguments.url, tls_ca=tls_ca, domain=arguments.domain)
        login = write_accounts(runs, folder, server=server, rotate=arguments.rotate, tables=tables)
    except (OSError, ValueError) as error:
        raise AsyncRLError(f"the users cannot be written: {error}") from error
    if not there:
        print(
            f"wrote {folder / 'nats-accounts.conf'}: include it in the server's configuration and reload it\n"
            f"wrote one file per role into its folder: set nats.credentials = {str(folder)!r}. People who watch get "
            f"{folder / 'monitor.json'} (reads everything) or {folder / 'observer.json'} (no texts)"
        )
    elif arguments.rotate:
        print(f"new passwords in {folder}: reload the server; clients logged in with an old one are disconnected")
    else:
        print(f"kept the users in {folder} and their passwords (--rotate makes new ones): reload the server")
    print(f"runs that these users serve: {', '.join(login.runs)}")
    return 0


def roles_text(runs: Sequence[str], tables: Tables = BUILT_IN) -> str:
    """Each role with the subjects it may publish to and listen on; everything else is refused by the server."""
    lines = []
    for role in login_roles(tables):
        allowed = permissions(role, runs, tables)
        lines.append(f"{role}  (user {user_of(runs[0], role)})")
        for what, subjects in (
            ("may publish to", allowed.publish),
            ("but not to", allowed.denied),
            ("may listen on", allowed.subscribe),
        ):
            lines += [f"  {what if number == 0 else '':<15}{subject}" for number, subject in enumerate(subjects)]
        lines.append("")
    return "\n".join(lines).rstrip()
