"""Entry of every actor process: `python -m actors.main ROLE ACTOR_ID RUN_DIR`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from actors.runtime.actor import open_context, run_actor
from asyncrl.bus.errors import BusDenied, BusError
from asyncrl.crash import set_role
from asyncrl.process import FATAL
from asyncrl.telemetry.logs import open_log
from topics.roles import ROLE_NAMES


async def run(role: str, actor_id: str, run_dir: Path) -> int:
    """Connect and run one role; returns the exit code."""
    log = open_log(actor=actor_id)
    set_role(role)
    module = importlib.import_module(f"actors.{role}.actor")
    try:
        context = await open_context(role, actor_id, run_dir, log)
    except (BusError, OSError, ValueError) as error:
        log.error("actor did not start", reason=str(error))
        return FATAL if isinstance(error, BusDenied) else 1
    return await run_actor(context, module.main)


def main() -> int:
    """Parse the arguments and run."""
    if len(sys.argv) != 4 or sys.argv[1] not in ROLE_NAMES:
        print(
            f"usage: python -m actors.main ROLE ACTOR_ID RUN_DIR, with ROLE one of {', '.join(ROLE_NAMES)}",
            file=sys.stderr,
        )
        return 2
    import uvloop

    return int(uvloop.run(run(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))


if __name__ == "__main__":
    raise SystemExit(main())
