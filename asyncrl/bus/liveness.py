"""Liveness of actors: a process that publishes no vital signs for long enough is frozen, unless it gets no CPU."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError
from asyncrl.bus.log import read_last_of_each
from topics.actors import VITALS_TAKEN
from topics.topic import VITALS

_ANSWER_S = 2.0  # for the server to answer with the newest vital signs
_START_S = 60.0  # time until the first vital signs of a process
_STARVED = 6  # times the silence after which one that waits for a CPU counts as frozen, too
_AT_ONCE = 500  # actors asked for in one request; the server answers 1,024 at most


class Liveness:
    """Times at which each actor last published new vital signs, as its log has it."""

    def __init__(
        self,
        bus: Bus,
        silence_s: float,
        on_silent: Callable[[str], None],
        *,
        on_starved: Callable[[str], None],
        waited_s: Callable[[str], float],
    ) -> None:
        """
        Args:
            silence_s: seconds without a vital sign after which an actor counts as frozen.
            on_silent: called with the actor's id, once per silence.
            on_starved: called instead, once per silence, if the process waited for a CPU for at least half of the
                silence.
            waited_s: returns the seconds for which an actor's process has waited for a CPU since it began.
        """
        self._bus = bus
        self._silence_s = silence_s
        self._on_silent, self._on_starved = on_silent, on_starved
        self._waited_s = waited_s
        self._quiet: dict[str, tuple[float, float]] = {}  # since when an actor is silent, and its CPU wait until then
        self._starved: set[str] = set()
        self._seen_at: dict[str, float] = {}
        self._newest: dict[str, int] = {}  # sequence of the newest vital signs of each actor

    async def watch(self) -> None:
        """Look and judge until cancelled."""
        tick = self._silence_s / 8
        while True:
            began = time.monotonic()
            await asyncio.sleep(tick)
            answers = await self._look()
            now = time.monotonic()
            if not answers or now - began > 2 * tick + _ANSWER_S:
                self._seen_at = {actor_id: max(now, seen_at) for actor_id, seen_at in self._seen_at.items()}
            self.judge(now)

    def judge(self, now: float) -> None:
        """Report those that are silent for too long by a time of `time.monotonic`."""
        for actor_id, seen_at in list(self._seen_at.items()):
            quiet_s = now - seen_at
            if quiet_s <= self._silence_s / 4:
                self._quiet.pop(actor_id, None)
                self._starved.discard(actor_id)
                continue
            waited_s = self._waited_s(actor_id)
            since, before_s = self._quiet.setdefault(actor_id, (now, waited_s))
            if quiet_s <= self._silence_s:
                continue
            if 0 < now - since <= 2 * (waited_s - before_s) and quiet_s <= _STARVED * self._silence_s:
                if actor_id not in self._starved:
                    self._starved.add(actor_id)
                    self._on_starved(actor_id)
                continue
            self.end(actor_id)
            self._on_silent(actor_id)

    def begin(self, actor_id: str) -> None:
        """Its process is started, and may take its time to the first vital sign."""
        self._seen_at[actor_id] = time.monotonic() + _START_S
        self._newest.pop(actor_id, None)  # the first ones found may be of an earlier start

    def end(self, actor_id: str) -> None:
        """Its process has ended."""
        self._seen_at.pop(actor_id, None)
        self._quiet.pop(actor_id, None)
        self._starved.discard(actor_id)

    async def _look(self) -> bool:
        """Read the newest vital signs; False where the server does not answer in time."""
        names = list(self._seen_at)
        try:
            for start in range(0, len(names), _AT_ONCE):
                subjects = [VITALS_TAKEN.subject(self._bus.run, name) for name in names[start : start + _AT_ONCE]]
                async with asyncio.timeout(_ANSWER_S):
                    records = await read_last_of_each(self._bus, VITALS, subjects)
                for record in records:
                    self._take(record.key, record.sequence)
        except (BusError, TimeoutError):
            return False
        return True

    def _take(self, actor_id: str, sequence: int) -> None:
        before, self._newest[actor_id] = self._newest.get(actor_id), sequence
        if before not in (None, sequence) and actor_id in self._seen_at:
            self._seen_at[actor_id] = time.monotonic()
