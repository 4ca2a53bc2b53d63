"""The buffer: assembles groups, bounds lag, packs batches. It alone decides the ends of trajectories."""

from __future__ import annotations

from actors.buffer.fold import BufferFold
from actors.buffer.state import Plan
from actors.runtime.actor import ActorFault, Context
from actors.runtime.keeper import Keeper
from topics.topic import BATCHES
from topics.wire import Message


async def main(context: Context) -> None:
    """Run the buffer until the run ends."""
    fold = BufferFold(Plan.of(context.config))
    keeper = Keeper(context, BATCHES, fold)

    def decide() -> list[Message]:
        decisions = fold.decide(keeper.now())
        context.vitals.update(
            ready_groups=fold.ready,
            open_groups=fold.open,
            late=fold.state.late,
            packed=fold.state.packed,
            trained=fold.state.trained,
        )
        if reason := fold.should_give_up():
            raise ActorFault(reason)
        return decisions

    await keeper.start()
    await keeper.run(decide, until=fold.next_deadline)
