"""Telling a frozen process from a busy one: every actor takes its vital signs every two seconds, so silence is death.

A silence counts only while the server answers and this process itself runs: whoever cannot hear does not judge.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from nats.aio.msg import Msg

from asyncrl.bus.connection import Bus
from topics.actors import VITALS_TAKEN

_ANSWER_S = 2.0  # for the server to answer a ping
_START_S = 60.0  # for a process to come to its first vital sign


class Pulses:
    """When each actor was last heard, on one connection."""

    def __init__(self, bus: Bus, silence_s: float, on_silent: Callable[[str], None]) -> None:
        """
        Args:
            silence_s: seconds without a vital sign after which an actor counts as frozen.
            on_silent: told the actor's id, once per silence.
        """
        self._bus = bus
        self._silence_s = silence_s
        self._on_silent = on_silent
        self._heard_at: dict[str, float] = {}

    async def watch(self) -> None:
        """Listen and judge until cancelled."""
        await self._bus.subscribe(VITALS_TAKEN.pattern(self._bus.run), self._on_vitals)
        tick = self._silence_s / 4
        while True:
            began = time.monotonic()
            await asyncio.sleep(tick)
            answers = self._bus.client.is_connected and await self._bus.answers(_ANSWER_S)
            now = time.monotonic()
            if not answers or now - began > 2 * tick + _ANSWER_S:
                self._heard_at = {actor_id: max(now, heard_at) for actor_id, heard_at in self._heard_at.items()}
            for actor_id, heard_at in list(self._heard_at.items()):
                if now - heard_at > self._silence_s:
                    del self._heard_at[actor_id]
                    self._on_silent(actor_id)

    def begin(self, actor_id: str) -> None:
        """Its process is started, and may take its time to the first vital sign."""
        self._heard_at[actor_id] = time.monotonic() + _START_S

    def end(self, actor_id: str) -> None:
        """Its process has ended."""
        self._heard_at.pop(actor_id, None)

    async def _on_vitals(self, message: Msg) -> None:
        self._heard_at[message.subject.rsplit(".", 1)[1]] = time.monotonic()
