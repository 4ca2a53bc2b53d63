"""`asyncrl purge`: make what a tenant or a user said unreadable, everywhere in a run."""

from __future__ import annotations

import argparse
import re
from typing import Any

from asyncrl.bus.connection import Bus
from asyncrl.bus.merged_reader import read_each
from asyncrl.cli.options import add_option
from asyncrl.cli.output import add_json, show
from asyncrl.cli.target import add_run, any_run, read_topics
from asyncrl.errors import WrongUsage
from asyncrl.live.tenant_keys import owner_of, tenant_digest, user_of
from asyncrl.run.purge import purge, purge_spools
from asyncrl.state.records import counted
from asyncrl.state.tainted_versions import learnt_from
from topics.keys import KEY_ADDED
from topics.wire import ID_PATTERN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, remote=False)  # `--user` is the user of a tenant
    parser.add_argument("--tenant", required=True, help="whose turns")
    add_option(parser, "--user USER", "", "of the tenant, as requests name it (default: all of them)")
    add_option(parser, "--before DAY", "", "those of days before this one, UTC: 2026-12-31")
    add_json(parser, "as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Erase data keys, and print their number and the versions that had learned from their messages."""
    if not re.match(ID_PATTERN, arguments.tenant):
        raise WrongUsage(f"--tenant takes letters, digits, _ and -; found {arguments.tenant!r}")
    if arguments.before and not re.fullmatch(r"\d{4}-\d{2}-\d{2}", arguments.before):
        raise WrongUsage(f"--before takes a day such as 2026-12-31; found {arguments.before!r}")
    user = user_of({}, arguments.user)
    owner = owner_of(arguments.tenant, user) if user else tenant_digest(arguments.tenant)
    before = arguments.before.replace("-", "")
    found = any_run(arguments)
    done = read_topics(found, "purge", lambda bus: _purge(bus, arguments.tenant, owner, before))
    done["waiting_erased"] = purge_spools(found.files.spool, owner, before)
    show(arguments, done, lambda: _text(done))
    return 0


async def _purge(bus: Bus, tenant: str, owner: str, before: str) -> dict[str, Any]:
    tenants: set[str] = set()
    await read_each(bus, KEY_ADDED, lambda message, _record: tenants.add(message.tenant))
    if tenant not in tenants:
        had = f"its tenants: {', '.join(sorted(tenants))}" if tenants else "it never had a tenant"
        raise WrongUsage(f"run {bus.run} never had a key of tenant {tenant!r}, so nothing is erased; {had}")
    purged = await purge(bus, owner, before, "operator")
    learnt = await learnt_from(bus, owner, before)
    return {
        "run": bus.run,
        "keys_erased": len(purged.keys),
        "keys_left": purged.left,
        "trajectories_trained": learnt.trajectories,
        "steps": learnt.steps,
        "first_version": learnt.steps[0] if learnt.steps else None,
    }


def _text(done: dict[str, Any]) -> str:
    left = f"left, of other owners and days: {done['keys_left']}"
    erased = f"run {done['run']}: data keys erased: {done['keys_erased']}; {left}"
    if done["waiting_erased"]:
        erased += f"\nerased of what waited for a gateway, messages and keys: {done['waiting_erased']}"
    if not done["steps"]:
        return f"{erased}\nno version has learnt from it"
    steps, turns = ", ".join(map(str, done["steps"])), counted(done["trajectories_trained"], "turn")
    return f"{erased}\ntrained: {turns}, in steps {steps}; version {done['first_version']} and all after it have learnt"
