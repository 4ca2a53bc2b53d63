"""A trainer group that goes on with fewer ranks where cards are not replaced, and with all of them once they are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from actors.learner.group import GroupLost, RankProcesses
from actors.learner.rank import Call
from actors.runtime.actor import Context
from asyncrl.training.megatron.layout import Layout
from asyncrl.training.trainers import layout_of

T = TypeVar("T")

_PAUSE_S = 2.0  # between two attempts to start all ranks


def chosen_cards(cards: Sequence[int], layout: Layout) -> Sequence[int]:
    """Return the cards that a learner goes on with: as many of the first ones as the layout divides, or none.

    Every replica of the model has its ranks, and every stage whole groups of ranks that share experts.
    """
    for count in range(len(cards), 0, -1):
        if count % layout.model == 0 and count // layout.pipeline % layout.expert == 0:
            return cards[:count]
    return ()


class ElasticGroup:
    """See `TrainerGroup`.

    All ranks are tried whenever the group starts. Those that do not start for `learner.elastic_s` are given up, one
    after another, and the others start without them.
    """

    def __init__(self, context: Context, on_lost: Callable[[], None]) -> None:
        """
        Args:
            on_lost: called when a rank is gone.
        """
        self._context, self._on_lost = context, on_lost
        self._group = RankProcesses(context, on_lost)
        self._closed = asyncio.Event()

    async def open(self) -> None:
        """See `TrainerGroup.open`.

        Raises:
            GroupLost: too few cards are left for one model.
        """
        context, learner = self._context, self._context.config.learner
        missing, began, reason = set[int](), time.monotonic(), ""
        while True:
            left = [card for card in range(learner.ranks) if card not in missing]
            if not (cards := chosen_cards(left, layout_of(context.config))):
                found = f"cards {sorted(missing)} are missing, and the {len(left)} others hold no whole model"
                raise GroupLost(f"{found}; the last reason: {reason}")
            self._group = RankProcesses(context, self._on_lost, cards)
            try:
                await self._group.open()
                break
            except GroupLost as error:
                await self._group.close()
                if self._is_stopped() or error.rank is None:
                    raise
                gone, reason = cards[error.rank], str(error)
                waited = time.monotonic() - began
                context.log.warning("card missing", card=gone, waited_s=round(waited, 1), reason=reason)
                if waited >= learner.elastic_s:
                    missing.add(gone)
                    continue
                await self._pause(learner.elastic_s - waited)
                if self._is_stopped():
                    raise
        context.vitals["ranks_missing"] = learner.ranks - len(cards)
        if missing:
            context.log.warning("learner goes on with fewer ranks", cards=list(cards), missing=sorted(missing))

    def _is_stopped(self) -> bool:
        return self._closed.is_set() or self._context.stop.is_set()

    async def _pause(self, left_s: float) -> None:
        stopped = [asyncio.create_task(event.wait()) for event in (self._closed, self._context.stop)]
        await asyncio.wait(stopped, timeout=min(_PAUSE_S, left_s), return_when=asyncio.FIRST_COMPLETED)
        for task in stopped:
            task.cancel()

    async def do(self, call: Call[T]) -> T:
        """See `TrainerGroup.do`."""
        return await self._group.do(call)

    def check(self) -> None:
        """See `TrainerGroup.check`."""
        self._group.check()

    async def close(self) -> None:
        """See `TrainerGroup.close`."""
        self._closed.set()
        await self._group.close()
