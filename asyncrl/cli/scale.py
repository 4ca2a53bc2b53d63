"""`asyncrl scale`: more or fewer processes of a role, during the run."""

from __future__ import annotations

import argparse
import asyncio

from asyncrl.bus.publish import publish
from asyncrl.cli.target import add_run, add_wait, live_run, watched
from asyncrl.errors import AsyncRLError, WrongUsage
from asyncrl.run.connect import FoundRun
from asyncrl.state.run_state import RunState
from topics.actors import MOST_PROCESSES, ScaleRequested
from topics.roles import pool_of, role_of
from topics.table import BUILT_IN, Tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "the live one")
    roles = ", ".join(BUILT_IN.scalable)
    about = f"such as rollout=4, or engine-NAME=2 for one of several groups of engines; roles: {roles}"
    parser.add_argument("counts", nargs="*", metavar="ROLE=COUNT", help=about)
    add_wait(parser)


def run(arguments: argparse.Namespace) -> int:
    """Request, wait until as many live, report."""
    if "=" in arguments.run_id:  # the first count, if no run is named
        arguments.counts, arguments.run_id = [arguments.run_id, *arguments.counts], ""
    if not arguments.counts:
        raise WrongUsage("how many processes of which role? For example: asyncrl scale rollout=4")
    wanted = read_counts(arguments.counts)
    asyncio.run(_scale(live_run(arguments), wanted, arguments.wait))
    print("scaled: " + ", ".join(f"{role} {count}" for role, count in wanted.items()))
    return 0


def read_counts(words: list[str]) -> dict[str, int]:
    """`["rollout=4"]` as `{"rollout": 4}`.

    Only a run knows the roles of its user's actors, so those that nothing here names pass.

    Raises:
        WrongUsage: an argument is no ROLE=COUNT of a role that can be scaled.
    """
    wanted = {}
    for word in words:
        role, _, count = word.partition("=")
        if role_of(role) in BUILT_IN.role_names:
            _check_scalable(role, BUILT_IN)
        if not count.isdecimal() or int(count) > MOST_PROCESSES:
            name = role if "=" in word else "ROLE"
            raise WrongUsage(f"{word!r}: expected {name}=COUNT with a whole number from 0 to {MOST_PROCESSES}")
        wanted[role] = int(count)
    return wanted


def _check_scalable(role: str, tables: Tables) -> None:
    if role_of(role) not in tables.scalable:
        raise WrongUsage(f"{role!r} cannot be scaled; what can: {', '.join(tables.scalable)}")


async def _scale(found: FoundRun, wanted: dict[str, int], wait_s: float) -> None:
    async with watched(found, "scale") as (bus, state, until):
        for role in wanted:
            _check_scalable(role, bus.tables)
        _check_known(state, wanted)
        request = await publish(bus, ScaleRequested(wanted))
        if not await until(lambda: _reached(state, wanted) or _differs(state, wanted, request), wait_s):
            raise AsyncRLError(_shortfall(state, wanted, wait_s))
        if _differs(state, wanted, request):
            raise AsyncRLError(_decision(state, wanted))


def _check_known(state: RunState, wanted: dict[str, int]) -> None:
    """Refuse the name of a role whose processes are in several groups, and of a group that is not there."""
    for pool in wanted:
        known = [name for name in state.wanted if role_of(name) == role_of(pool)]
        if known and pool not in known:
            raise WrongUsage(f"run {state.run} has no {pool}; name one of {', '.join(known)}")


def _live(state: RunState, pool: str) -> int:
    return sum(actor.live for actor in state.fleet if pool_of(actor.actor_id) == pool)


def _reached(state: RunState, wanted: dict[str, int]) -> bool:
    return all(state.wanted.get(role) == count == _live(state, role) for role, count in wanted.items())


def _differs(state: RunState, wanted: dict[str, int], request: int) -> bool:
    """Return whether the request is answered, and the run wants other numbers: by a newer one, or for lack of GPUs."""
    return state.scaled_for >= request and any(state.wanted.get(role) != count for role, count in wanted.items())


def _decision(state: RunState, wanted: dict[str, int]) -> str:
    found = [f"{role} {state.wanted.get(role, 0)} instead of {count}" for role, count in wanted.items()]
    return (
        f"the run has decided otherwise: {', '.join(found)}; another request came in between, as `asyncrl "
        "status` shows, or a group has GPUs for no more"
    )


def _shortfall(state: RunState, wanted: dict[str, int], wait_s: float) -> str:
    found = ", ".join(f"{role} {_live(state, role)} of {count}" for role, count in wanted.items())
    words = next((actor.error for actor in state.fleet if pool_of(actor.actor_id) in wanted and actor.error), "")
    rest = (
        f"; last error: {words}" if words else "; the run continues with it, and `asyncrl status` shows how far it is"
    )
    return f"after {wait_s:.0f} s there are: {found}{rest}"
