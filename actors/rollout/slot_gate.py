"""The slots of a rollout worker: a trajectory takes one while its program works, not while it is prepared or graded."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque

_MEAN_S = 30.0  # over which the share of idle slots is a mean


class SlotGate:
    """Gives slots to trajectories in the order in which they ask."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.taken = 0
        self._preparing: dict[object, float] = {}  # since when, by trajectory
        self._prepare_s = 0.0  # of the newest one that is prepared
        self._waiting: deque[asyncio.Future[None]] = deque()  # those of cancelled ones are passed over
        self._begun = False  # whether a trajectory has had a slot
        self._idle, self._seen_s = 0.0, time.monotonic()
        self._taken_s, self._changed_s = 0.0, time.monotonic()

    def prepares(self, who: object) -> None:
        """A trajectory is being prepared from now on, and then asks for a slot."""
        self._preparing[who] = time.monotonic()

    def prepared(self, who: object) -> None:
        """A trajectory is prepared, or has ended; a second call has no effect."""
        if (began_s := self._preparing.pop(who, None)) is not None:
            self._prepare_s = time.monotonic() - began_s

    async def take(self) -> None:
        """Wait for a slot, and take it."""
        if self.taken >= self.slots or self._waiting:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self.give()  # it had got one
                raise
            return
        self._change(1)

    def give(self) -> None:
        """Return a slot, which the next one takes."""
        self._change(-1)
        self._hand_out()

    def resize(self, slots: int) -> None:
        """Have that many slots from now on; those that are taken stay so."""
        self.slots = slots
        self._hand_out()

    def vitals(self) -> dict[str, float]:
        """Return the vital signs of the slots; call it every second."""
        now = time.monotonic()
        idle = max(0.0, 1 - self.taken / self.slots) if self._begun and self._preparing else 0.0
        self._idle += (idle - self._idle) * (1 - math.exp(-(now - self._seen_s) / _MEAN_S))
        self._seen_s = now
        self._change(0)
        return {
            "slots": self.slots,
            "slots_taken": self.taken,
            "slots_taken_s": round(self._taken_s, 2),  # so far, of all slots together
            "slots_unprepared": round(self._idle, 4),  # share that waits for sandboxes
            "prepared": sum(not turn.done() for turn in self._waiting),
            "preparing": len(self._preparing),
            "prepare_s": round(self._prepare_s, 2),
        }

    def _hand_out(self) -> None:
        while self._waiting and self.taken < self.slots:
            turn = self._waiting.popleft()
            if not turn.done():
                self._change(1)
                turn.set_result(None)

    def _change(self, by: int) -> None:
        now = time.monotonic()
        self._taken_s += self.taken * (now - self._changed_s)
        self._changed_s = now
        self.taken += by
        self._begun = self._begun or by > 0
