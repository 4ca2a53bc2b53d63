"""The engines of a run, as an actor that samples from them follows them."""

from __future__ import annotations

import re

from actors.runtime.actor import Context
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import read_last_of_each
from asyncrl.engine.client import EngineClient
from asyncrl.engine.fleet import Fleet, Sampler
from asyncrl.engine.scripted import ScriptedClient
from topics.engines import TOPICS
from topics.topic import ENGINES
from topics.wire import WireError

_ADDRESS = re.compile(r"^https?://([A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:\d{1,5})?(/[\w./-]*)?\Z", re.ASCII)


def open_fleet(context: Context) -> Fleet:
    """The engines of the actor's run, none of which is known before it follows them."""
    settings, key = context.config.engine, context.files.engine_key(context.config)

    def open_client(address: str) -> Sampler:
        if address.startswith("scripted:") and settings.kind == "scripted":
            return ScriptedClient(
                mean_s=settings.scripted_mean_s, sigma=settings.scripted_sigma, tokens=settings.scripted_tokens
            )
        if not _ADDRESS.match(address):
            raise WireError(f"{address!r} is no address of an engine; expected http://host:port")
        return EngineClient(address, api_key=key)

    return Fleet(open_client, counts=context.vitals, fail=context.fail)


async def follow_engines(context: Context, fleet: Fleet) -> Listener:
    """Tell a fleet the newest state of each engine, and what follows on the log: its length does not matter."""
    listener = context.listen(ENGINES, lambda _topic, message, _record: fleet.apply(message))
    subjects = [topic.pattern(context.bus.run) for topic in TOPICS]
    newest = sorted(await read_last_of_each(context.bus, ENGINES, subjects), key=lambda record: record.sequence)
    for record in newest:
        listener.subscribe(record)
    await listener.handed_over()
    await listener.start(newest[-1].sequence if newest else 0)
    return listener
