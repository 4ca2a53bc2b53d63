"""The restart of a gateway: the next process listens before the process before it stops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from actors.runtime.actor import Context
from asyncrl.background import first_of
from asyncrl.bus.errors import BusError
from asyncrl.bus.publish import publish
from asyncrl.run.gateway_port import inherited_socket, predecessor
from topics.actors import ActorLeaving

_LISTENS = signal.SIGUSR1  # from the next process
_NEXT_S = 30.0  # for the next process to listen
_ANNOUNCE_S = 2.0
_LEAVE_S = 5.0  # for running replies if no next process takes new requests


class Handover:
    """Signals between the process before this one, this process and the next one.

    A gateway that is asked to leave publishes `actor.leaving`. The supervisor starts the next process, which sends
    SIGUSR1 once it listens, or asks the gateway to leave once more: no next process comes. Both processes accept
    connections of one inherited socket, so the kernel never refuses a connection.
    """

    def __init__(self, context: Context) -> None:
        self.socket = inherited_socket()
        self._context = context
        self._before = predecessor() if self.socket is not None else 0
        self._next_listens = asyncio.Event()

    @property
    def follows(self) -> bool:
        """Return whether this process replaces one that may still serve."""
        return self._before > 0

    @property
    def drain_s(self) -> float:
        """Return the seconds that running replies have."""
        return self._context.config.gateway.drain_s if self._next_listens.is_set() else _LEAVE_S

    def take_over(self) -> None:
        """Tell the process before this one that this process listens."""
        if self.socket is not None:
            asyncio.get_running_loop().add_signal_handler(_LISTENS, self._next_listens.set)
        if self._before and _parent_of(self._before) == os.getppid():  # else it has ended
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._before, _LISTENS)

    async def wait(self) -> None:
        """Wait until the next process listens; returns at once if there is no next process."""
        context = self._context
        if self.socket is None or context.faults or context.hurry.is_set():
            return
        try:
            async with asyncio.timeout(_ANNOUNCE_S):
                await publish(context.bus, ActorLeaving(context.role, context.actor_id, os.getpid()))
        except (TimeoutError, BusError):
            return
        await first_of(self._next_listens.wait(), context.hurry.wait(), timeout_s=_NEXT_S)


def _parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if the process has ended, or the kernel does not report it."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0
