"""Entry of every actor process, on any host: `python -m actors.main ROLE ACTOR_ID --credentials FILE`.

The settings come over the bus. The directory of the run is needed only by roles that share its files: the learner
and engines (weights), and those that load the run's model or the user's functions from its folders. A host without that
directory has a folder with the files sent to it.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until all is imported: passes of the collector over what imports make are an eighth of their time

import argparse
import faulthandler
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from actors.runtime.actor import Login, module_of, open_context, run_actor
from actors.runtime.cpu_priority import set_nice
from asyncrl.bus.errors import BusDenied
from asyncrl.crash import set_role
from asyncrl.errors import AsyncRLError
from asyncrl.imports import late_certificates
from asyncrl.ports import LOOPBACK
from asyncrl.process import DENIED, FATAL, STACK_SIGNAL
from asyncrl.telemetry.logs import open_log
from asyncrl.telemetry.output import print_lossy
from topics.roles import OWN


async def run(login: Login) -> int:
    """Connect and run one role; returns the exit code."""
    log = open_log(actor=login.actor_id)
    set_role(login.role)
    try:
        context = await open_context(login, log)
        set_nice(context.config, login.actor_id)
        with late_certificates():
            module = module_of(context)
    except (AsyncRLError, OSError) as error:
        log.error("actor did not start", reason=str(error))
        if isinstance(error, BusDenied):
            return DENIED
        return FATAL if isinstance(error, AsyncRLError) and error.fatal else 1
    gc.freeze()  # imported objects live until the process ends
    gc.enable()
    return await run_actor(context, module.main)


def main() -> int:
    """Parse the arguments and run."""
    print_lossy()
    faulthandler.register(STACK_SIGNAL)  # to its log, also while the event loop is blocked
    return int(uvloop.run(run(parse(sys.argv[1:]))))


def parse(words: Sequence[str]) -> Login:
    """Read the arguments of an actor process; wrong ones end it with the usage and code 2."""
    parser = argparse.ArgumentParser(prog="python -m actors.main", description="Join a run as one of its actors.")
    parser.add_argument("role", help=f"{', '.join(OWN)}, or that of an actor in the config")
    parser.add_argument("actor_id", help="its name: rollout-2")
    parser.add_argument("--run", required=True, help="id of the run")
    parser.add_argument("--credentials", type=Path, required=True, help="file with the login of the role")
    parser.add_argument("--address", default="", help="URL of the server from here, if not the one in there")
    parser.add_argument("--home", type=Path, help="folder with what this host was sent, if not the run's directory")
    parser.add_argument("--host", default=LOOPBACK, help="address of this host, at which its servers are reached")
    given = parser.parse_args(words)
    home = given.home.absolute() if given.home is not None else None
    return Login(given.role, given.actor_id, given.run, given.credentials.absolute(), given.address, home, given.host)


if __name__ == "__main__":
    raise SystemExit(main())
