"""The engines of a run, as an actor that samples from them follows them."""

from __future__ import annotations

from collections.abc import Callable

from actors.runtime.actor import Context
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import read_last_of_each
from asyncrl.config.pools import Purpose, purpose_of
from asyncrl.engine.clients import open_client
from asyncrl.engine.control import read_key
from asyncrl.engine.fleet import EngineNews, Fleet, Sampler
from asyncrl.engine.router import RouterClient
from topics.roles import role_of
from topics.topic import ENGINES
from topics.weights import WeightsRefused


def open_fleet(context: Context, *, reserved: Purpose | None = None) -> Fleet:
    """The engines of the actor's run; the fleet is empty until it follows them.

    Args:
        reserved: what those serve that take requests for their weights alone.
    """
    settings = context.config.engine

    def opened(engine_id: str, address: str) -> Sampler:
        if role_of(engine_id) == "router":
            key = read_key(context.files.key_of(engine_id))
            return RouterClient(address, api_key=key, apart=settings.disaggregated)
        return open_client(settings, engine_id, address, context.files.engine_key_file(settings, engine_id))

    def apart(engine_id: str) -> bool:
        return role_of(engine_id) == "engine" and purpose_of(context.config, engine_id) == reserved

    return Fleet(opened, counts=context.vitals, fail=context.fail, reserved=apart)


async def follow_fleet(context: Context, fleet: Fleet, *purposes: Purpose) -> Listener:
    """Give a fleet the engines that it samples from: those of training or the router in front of them, or others.

    Args:
        purposes: the purposes that the engines serve; training if not given.
    """
    served = purposes or ("training",)
    sampled = "router" if context.config.engine.router.count and "training" in served else "engine"

    def take(news: EngineNews | WeightsRefused) -> None:
        if role_of(news.engine_id) != sampled or purpose_of(context.config, news.engine_id) not in served:
            return
        if isinstance(news, WeightsRefused):
            fleet.refuse(news)
        else:
            fleet.apply(news)

    return await follow_engines(context, take)


async def follow_engines(context: Context, take: Callable[[EngineNews], None]) -> Listener:
    """Take in the newest state of each engine, and what follows on the log: its length does not matter."""
    listener = context.listen(ENGINES, lambda _topic, message, _record: take(message))
    topics = [topic for topic in context.bus.tables.topics if topic.stream is ENGINES]
    subjects = [topic.pattern(context.bus.run) for topic in topics]
    newest = sorted(await read_last_of_each(context.bus, ENGINES, subjects), key=lambda record: record.sequence)
    for record in newest:
        listener.subscribe(record)
    await listener.handed_over()
    await listener.start(newest[-1].sequence if newest else 0)
    return listener
