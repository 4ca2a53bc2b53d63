"""The port of a run's gateways. The process that starts the run listens on it from the start to the end of the run.

Gateways inherit the socket. While no gateway runs, the kernel keeps connections until the next one accepts them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence

import msgspec

from asyncrl.config.settings import Config
from asyncrl.errors import LaunchError
from asyncrl.ports import hold_port, listen_problem
from asyncrl.run.placement import Job, Placed

WAITING = 1024  # connections that the kernel keeps until a gateway accepts them
_PREDECESSOR = "ASYNCRL_GATEWAY_PREDECESSOR"  # environment variable: id of the process that waits for this one
_INHERITED = "ASYNCRL_GATEWAY_SOCKET"  # environment variable: number of the inherited socket
_POLL_S = 0.1  # the kernel does not announce that a port is free


async def held_gateway(config: Config, wait_s: float = 0.0) -> tuple[Config, socket.socket | None]:
    """Listen on the port of the gateways of this machine, until the socket is closed.

    Args:
        wait_s: how long the gateways of a start before may take to end.

    Returns:
        The settings, in which a `gateway.port` of 0 is replaced by the chosen port; no socket without a gateway.

    Raises:
        LaunchError: another program has it.
    """
    gateway, ends = config.gateway, time.monotonic() + wait_s
    if not gateway.count or not config.placement.one_machine:
        return config, None
    while True:
        try:
            holder = hold_port(gateway.host, gateway.port)
        except OSError as error:
            if time.monotonic() > ends:
                problem = listen_problem(gateway.host, gateway.port) or str(error)
                raise LaunchError(f"gateway: {problem}; name another gateway.port (0: any free one)") from error
            await asyncio.sleep(_POLL_S)
        else:
            holder.setblocking(False)
            # Connections of an earlier start may linger, and those that are accepted here have the same flag.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.listen(WAITING)
            gateway = msgspec.structs.replace(gateway, port=holder.getsockname()[1])
            return msgspec.structs.replace(config, gateway=gateway), holder


def with_gateway_socket(job: Job, listens: socket.socket | None) -> Job:
    """Return a job that inherits the listening socket of the gateways, if there is one."""
    if listens is None:
        return job
    number = listens.fileno()
    environment = {**job.environment, _INHERITED: str(number)}
    return job._replace(environment=environment, inherits=(*job.inherits, number))


def inherited_socket() -> socket.socket | None:
    """Return the listening socket that this process inherited; None without one."""
    number = os.environ.get(_INHERITED, "")
    return socket.socket(fileno=int(number)) if number else None


def follows(job: Job, before: Sequence[Placed]) -> Job:
    """Return a job that knows the newest process before it, if one serves until the job listens."""
    if not before:
        return job
    return job._replace(environment={**job.environment, _PREDECESSOR: str(before[-1].pid)})


def predecessor() -> int:
    """Return the id of the process that serves until this one listens; 0: there is none."""
    return int(os.environ.get(_PREDECESSOR, "0"))
