"""Share cores between serving and training: processes that no client waits for yield to those that serve."""

from __future__ import annotations

import contextlib
import os

from asyncrl.config.pools import serves_clients
from asyncrl.config.settings import Config


def set_nice(config: Config, actor_id: str) -> None:
    """Lower the priority of this process, and of those that it starts, below those that serve clients of a gateway."""
    if config.gateway.count and not serves_clients(config, actor_id):
        with contextlib.suppress(OSError):  # if the kernel refuses, all have the same priority
            os.nice(config.gateway.nice)
        if config.gateway.idle == "all":
            leave_cores()


def leave_cores() -> None:
    """Let the kernel run this thread, and those that it starts, only on cores that serving does not use."""
    with contextlib.suppress(OSError, AttributeError):  # the kernel refuses it, or is another one
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
