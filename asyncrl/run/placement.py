"""Start the processes of a run on this machine."""

from __future__ import annotations

import asyncio
import os

from asyncrl.process import python, with_parent
from asyncrl.run.directory import RunFiles


async def start_actor(
    files: RunFiles, role: str, actor_id: str, *, own_session: bool = False
) -> asyncio.subprocess.Process:
    """Start a process for a role of a run; it dies with this one.

    Args:
        own_session: Ctrl-C in the terminal is not for it.
    """
    return await start_process(files, actor_id, "actors.main", role, actor_id, str(files.root), own_session=own_session)


async def start_process(
    files: RunFiles, actor_id: str, module: str, *words: str, own_session: bool = False, inherits: tuple[int, ...] = ()
) -> asyncio.subprocess.Process:
    """Start a module as a process that dies with this one; what it prints goes to an actor's log.

    Args:
        inherits: file descriptors that stay open in it.
    """
    with (files.logs / f"{actor_id}.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *python("-m", module, *words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=with_parent(),
            start_new_session=own_session,
            pass_fds=inherits,
        )
