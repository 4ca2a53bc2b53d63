"""A trimmer on a real server."""

import asyncio
import contextlib

from actors.runtime.keeper import Input, Keeper
from actors.supervisor.trimmer import Trimmer
from actors.supervisor.trimmer_fold import TrimmerFold, trimmer_inputs
from asyncrl.bus.publish import say
from topics.topic import FLEET


class Owner:
    """The fold of a warden that does nothing else."""

    def __init__(self, cast):
        self.said = []
        self.room = TrimmerFold(cast)

    def apply(self, topic, message, record):
        self.room.apply(topic, message, record)
        self.said.append((topic, message))

    @property
    def topics(self):
        return [topic for topic, _ in self.said]


@contextlib.asynccontextmanager
async def trimming(stage, bus):
    """A trimmer at work, and what its warden's log says."""
    context, owner = stage.context("warden", bus), Owner(stage.cast)
    inputs = [Input(stream, topics) for stream, topics in trimmer_inputs(stage.cast).items()]
    keeper = Keeper(context, FLEET, inputs, owner)
    await keeper.start()
    task = asyncio.create_task(Trimmer(context, keeper, owner.room).run())
    context.watch(task)
    try:
        yield owner
        assert not context.faults
    finally:
        task.cancel()
        await keeper.close()


async def tell(bus, topic, message, key=""):
    headers = {"writer": "test"} if topic.stream.keeper else {}
    return await say(bus, topic, message, key=key, headers=headers)
