"""A trimmer on a real server."""

import contextlib

from actors.runtime.keeper import Keeper
from actors.supervisor.trimmer import Trimmer
from actors.supervisor.trimmer_fold import TrimmerFold
from asyncrl.bus.publish import publish
from topics.table import BUILT_IN
from topics.topic import FLEET


class Owner(TrimmerFold):
    """The fold of a supervisor that does nothing else."""

    def __init__(self, config):
        super().__init__(config)
        self.messages = []

    def apply(self, topic, message, record):
        super().apply(topic, message, record)
        if message is not None:
            self.messages.append((topic, message))

    @property
    def topics(self):
        return [topic for topic, _ in self.messages]


@contextlib.asynccontextmanager
async def keeping(context, owner):
    """A supervisor's keeper, which folds its log into `owner`."""
    keeper = Keeper(context, FLEET, owner)
    await keeper.start()
    try:
        yield keeper
    finally:
        await keeper.close()


@contextlib.asynccontextmanager
async def trimming(stage, bus):
    """A trimmer at work, and what its supervisor's log says."""
    context, owner = stage.context("supervisor", bus), Owner(stage.config)
    async with keeping(context, owner) as keeper:
        task = context.tasks.start(Trimmer(context, keeper, owner).run())
        try:
            yield owner
            assert not context.faults
        finally:
            task.cancel()


async def announce(bus, message):
    return await publish(bus, message, headers={"writer": "test"} if BUILT_IN.topic_for(message).stream.keeper else {})
