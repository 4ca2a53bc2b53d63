"""`asyncrl roles`: what each role may say and hear, and the users that a server of one's own needs for it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from asyncrl.bus.logins import write_accounts
from asyncrl.bus.permissions import ROLES, permissions, user_of
from asyncrl.errors import Fault, WrongUsage

_RUN = re.compile(r"[a-z0-9-]{1,32}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run_id", nargs="?", default="run", metavar="RUN", help="id of the run (default: run)")
    parser.add_argument(
        "--config", default="", metavar="FOLDER", help="make users: FOLDER/nats-accounts.conf and FOLDER/ROLE.json"
    )
    parser.add_argument(
        "--url", default="tls://localhost:4222", help="server that these users log in to (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or write the files."""
    if _RUN.fullmatch(arguments.run_id) is None:
        raise WrongUsage(f"{arguments.run_id!r} is no id of a run; expected 1 to 32 of a-z, 0-9 and -")
    if not arguments.config:
        print(roles_text(arguments.run_id))
        return 0
    folder = Path(arguments.config)
    try:
        write_accounts(arguments.run_id, arguments.url, folder)
    except OSError as error:
        raise Fault(f"the users cannot be written: {error}") from error
    print(
        f"wrote {folder / 'nats-accounts.conf'}: include it in the server's configuration and reload it\n"
        f"wrote one file per role beside it: set nats.credentials = {str(folder)!r}, and give "
        f"{folder / 'monitor.json'} to those who watch"
    )
    return 0


def roles_text(run: str) -> str:
    """Each role with the subjects it may publish to and listen on; everything else is refused by the server."""
    lines = []
    for role in ROLES:
        allowed = permissions(role, run)
        lines.append(f"{role}  (user {user_of(run, role)})")
        for what, subjects in (
            ("may publish to", allowed.publish),
            ("but not to", allowed.denied),
            ("may listen on", allowed.subscribe),
        ):
            lines += [f"  {what if number == 0 else '':<15}{subject}" for number, subject in enumerate(subjects)]
        lines.append("")
    return "\n".join(lines).rstrip()
