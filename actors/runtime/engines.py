"""The engines of a run, as an actor that samples from them follows them."""

from __future__ import annotations

from actors.runtime.actor import Context
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import read_last_of_each
from asyncrl.engine.control import KINDS
from asyncrl.engine.fleet import Fleet
from topics.table import TOPICS
from topics.topic import ENGINES


def open_fleet(context: Context) -> Fleet:
    """The engines of the actor's run, none of which is known before it follows them."""
    settings = context.config.engine
    key = context.files.engine_key(settings)
    client = KINDS[settings.kind].client
    return Fleet(lambda address: client(settings, address, key), counts=context.vitals, fail=context.fail)


async def follow_engines(context: Context, fleet: Fleet) -> Listener:
    """Tell a fleet the newest state of each engine, and what follows on the log: its length does not matter."""
    listener = context.listen(ENGINES, lambda _topic, message, _record: fleet.apply(message))
    subjects = [topic.pattern(context.bus.run) for topic in TOPICS if topic.stream is ENGINES]
    newest = sorted(await read_last_of_each(context.bus, ENGINES, subjects), key=lambda record: record.sequence)
    for record in newest:
        listener.subscribe(record)
    await listener.handed_over()
    await listener.start(newest[-1].sequence if newest else 0)
    return listener
