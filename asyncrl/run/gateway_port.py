"""The port of a run's gateways: theirs from the start of the run to its end, though they listen much later."""

from __future__ import annotations

import asyncio
import socket
import time

import msgspec

from asyncrl.config.settings import Config
from asyncrl.errors import LaunchError
from asyncrl.ports import hold_port, listen_problem

_POLL_S = 0.1  # the kernel does not announce that a port is free


async def held_gateway(config: Config, wait_s: float = 0.0) -> tuple[Config, socket.socket | None]:
    """Take the port that gateways of this machine will listen on, until the socket is closed.

    Args:
        wait_s: how long the gateways of a start before may take to end.

    Returns:
        The settings, in which a `gateway.port` of 0 is the port that was chosen; no socket where there is no gateway.

    Raises:
        LaunchError: another program has it.
    """
    gateway, ends = config.gateway, time.monotonic() + wait_s
    if not gateway.count or config.placement.kind != "local":
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
            gateway = msgspec.structs.replace(gateway, port=holder.getsockname()[1])
            return msgspec.structs.replace(config, gateway=gateway), holder
