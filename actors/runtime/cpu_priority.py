"""Cores that serving and training share: what no client waits for leaves them to what serves."""

from __future__ import annotations

import contextlib
import os

from asyncrl.config.pools import serves_clients
from asyncrl.config.settings import Config


def give_way(config: Config, actor_id: str) -> None:
    """Let the kernel schedule this process, and those that it starts, behind those that serve clients of a gateway."""
    if config.gateway.count and not serves_clients(config, actor_id):
        with contextlib.suppress(OSError):  # where the kernel refuses it, all are alike
            os.nice(config.gateway.nice)
        if config.gateway.idle == "all":
            leave_cores()


def leave_cores() -> None:
    """Let the kernel run this thread, and those that it starts, only on cores that serving does not use."""
    with contextlib.suppress(OSError, AttributeError):  # the kernel refuses it, or is another one
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
