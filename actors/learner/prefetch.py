"""Rows of the batches to come."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from actors.learner.rank import Rank
from asyncrl.background import first_of
from topics.actors import Activity

if TYPE_CHECKING:
    from actors.learner.fold import LearnerFold
    from actors.learner.group import TrainerGroup
    from actors.runtime.actor import Context
    from actors.runtime.keeper import Keeper


async def fetch_once_packed(keeper: Keeper, fold: LearnerFold, group: TrainerGroup, step: int) -> None:
    """Let the group begin to fetch a batch once it is packed, unless the learner shall stop first."""
    while (sequence := fold.sequence(step)) is None:
        if keeper.context.stop.is_set():
            return  # from now on `changes` returns at once: a loop would never give way to other tasks
        await keeper.changes()
    if not fold.skips(step):
        await group.ask(Rank.gather, sequence, False)


async def gathered(context: Context, group: TrainerGroup, step: int, sequence: int) -> bool:
    """Wait until a teacher that is a server has answered for the rows of a batch; False if the actor shall stop first.

    Raises:
        AsyncRLError: as `Rank.gather`.
    """
    if not context.config.learner.teacher.url:
        return True
    context.doing(Activity("awaiting teacher", step))
    gathering = asyncio.ensure_future(group.ask(Rank.gather, sequence, True))
    try:
        await first_of(gathering, context.stop.wait())
        if gathering.done():
            await gathering
        return gathering.done()
    finally:
        gathering.cancel()
