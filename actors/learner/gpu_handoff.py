"""The learner's turns on a GPU that engines share with it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from actors.learner.group import Stopping
from asyncrl.bus.log import read_last
from asyncrl.crash import crash_point
from topics.actors import Activity, HeldWork, Waiting
from topics.gpu_handoff import CARD_TAKEN, CardRequested, CardReturned

if TYPE_CHECKING:
    from actors.learner.fold import LearnerFold
    from actors.learner.outbox import Outbox
    from actors.runtime.actor import Context
    from actors.runtime.keeper import Keeper


class Turns:
    """Asks for the GPU, and returns it; without `placement.colocate = "time_slice"` the GPU is the learner's own."""

    def __init__(self, context: Context, keeper: Keeper, fold: LearnerFold) -> None:
        self._context, self._keeper, self._fold = context, keeper, fold
        self.shared = context.config.placement.colocate == "time_slice"
        engine = context.config.engine
        # An engine may just start its server, and then take a version, before it sees that it is asked.
        self._patience_s = engine.start_deadline_s + engine.update_deadline_s
        self._held = False
        self._waited_s = 0.0

    async def take(self) -> None:
        """Return once no engine has anything on the GPU.

        An engine that has not left after the time that its start and an update may take has ended without a successor,
        or is stuck: the next request names it, and one that lives then ends itself.

        Raises:
            Stopping: the learner is asked to stop while it waits.
        """
        if self._held or not self.shared:
            return
        began, context = time.monotonic(), self._context
        before = context.take_vitals().doing
        context.doing(Activity("awaiting card", self._fold.state.turns.turn + 1))
        context.holding = lambda: self._awaited(time.monotonic() - began)
        try:
            await self._granted(began)
        finally:
            context.holding = list
            context.doing(before)
        self._held = True
        self._waited_s = time.monotonic() - began
        context.count("card_wait_s", self._waited_s)
        crash_point("card.granted")

    def _awaited(self, waited_s: float) -> list[HeldWork]:
        """The GPU, once for each engine that has not left it."""
        holders = self._fold.state.turns.holders
        return [HeldWork("card", waited_s, waited_s, Waiting("engine", name)) for name in holders]

    async def _granted(self, began: float) -> None:
        await self._ask([])
        while holders := self._fold.state.turns.holders:
            self._check()
            left_s = began + self._patience_s - time.monotonic()
            if left_s <= 0:
                self._context.log.error("engines have not left the GPU", engines=holders, after_s=self._patience_s)
                self._context.count("cards_not_left", len(holders))
                await self._ask(holders)
            else:
                await self._keeper.changes(until=self._keeper.now() + left_s)

    async def give_back(self, outbox: Outbox) -> None:
        """Return the GPU, whose memory is free, after all earlier messages are on the log."""
        if self._held:
            await outbox.stored()  # engines that take the GPU find the newest version
            crash_point("card.rested")
            self._held = False
            await self._keeper.append_until_stored([CardReturned(self._fold.state.turns.turn, self._waited_s)])
            crash_point("card.returned")

    async def _ask(self, without: list[str]) -> None:
        """Append a request, and fold every engine's taking that was stored before it."""
        await self._keeper.append_until_stored([CardRequested(self._fold.state.turns.turn + 1, without)])
        self._check()
        crash_point("card.requested")
        bus = self._context.bus
        newest = await read_last(bus, CARD_TAKEN)
        while newest is not None and self._fold.state.turns.taken < newest.sequence:
            await self._keeper.changes()
            self._check()

    def _check(self) -> None:
        if self._context.stop.is_set():
            raise Stopping("the learner shall stop before it has the GPU")
