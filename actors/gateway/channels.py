"""The engines that a gateway asks: those of training, or those that hold the channel `live` and its canary."""

from __future__ import annotations

from typing import Any, NamedTuple

from actors.runtime.actor import Context
from actors.runtime.engines import follow_fleet, open_fleet
from asyncrl.bus.listen import Listener
from asyncrl.bus.log import Record
from asyncrl.config.engine_settings import Capability
from asyncrl.config.pools import Purpose
from asyncrl.config.settings import Config
from asyncrl.data.model_dir import ModelInfo
from asyncrl.engine.answer import Decode
from asyncrl.engine.generator import Generator
from asyncrl.engine.request_options import RequestOptions
from asyncrl.live.traffic_split import Arm, Trials
from topics.promotions import CANARY_ENDED, WEIGHTS_CANARIED, WEIGHTS_PROMOTED
from topics.topic import FLEET, Topic

LIVE_FIRST = 100
"""Priority of requests of the gateway; those of rollouts have 0. SGLang retracts for a difference above 10."""


class Service(NamedTuple):
    """The generator of a turn, and its side of a comparison."""

    generator: Generator
    arm: Arm
    row_bytes: int = 0  # of the experts of a token; 0: engines are not asked for them


class Channels:
    """The fleets of a gateway, and what samples from them."""

    def __init__(self, context: Context, served: ModelInfo, decode: Decode) -> None:
        self._context = context
        settings = context.config.gateway
        purposes: list[Purpose] = ["live"] if settings.engines else ["training"]
        self._purposes: list[Purpose] = [*purposes, "canary"] if settings.canary_engines else purposes
        self._trials = Trials()
        # Engines that hold a version load the next one without requests.
        in_place = context.config.weights.update == "in_place" and not settings.engines
        self._fleet = open_fleet(context, reserved="canary")
        trains = context.config.live.fraction > 0
        self._row_bytes = served.route_bytes if trains and context.config.learner.routing == "replay" else 0
        routed = self._row_bytes > 0
        manner = RequestOptions(
            settings.stream_tokens,
            in_place,
            seeded=True,  # where the client gives a seed
            routed=routed,
            unrouted=True,
            priority=LIVE_FIRST,
            event_s=settings.stream_s,
        )
        self._generator = Generator(self._fleet, served, decode, counts=context.vitals, manner=manner)
        self._listeners: list[Listener] = []

    async def start(self) -> None:
        """Follow the engines, the live version and the canary."""
        if "canary" in self._purposes:
            moves = self._context.listen(FLEET, self._take, [WEIGHTS_PROMOTED, WEIGHTS_CANARIED, CANARY_ENDED])
            self._listeners.append(moves)
            await moves.start()
            await moves.caught_up()
        self._listeners.append(await follow_fleet(self._context, self._fleet, *self._purposes))

    def _take(self, _topic: Topic[Any], message: Any, record: Record) -> None:
        self._trials.apply(message, record.sequence)

    def service(self, owner: str, session: str) -> Service:
        """Return what answers a turn of a session.

        Args:
            owner: whose it is, by `asyncrl.live.tenant_keys`.
        """
        return Service(self._generator, self._trials.arm(owner, session), self._row_bytes)

    @property
    def unready_s(self) -> float:
        """Return for how many seconds no engine was ready; 0 if one is ready."""
        return self._fleet.unready_s

    async def close(self) -> None:
        """Follow them no more, and close the connections."""
        for listener in self._listeners:
            await listener.close()
        await self._fleet.close()


def has_grammars(config: Config) -> bool:
    """Return whether the engines that answer force forms of a reply; those that others run are SGLang's."""
    engines, name = config.engine, config.gateway.engines
    answering = [engines.groups[name]] if name else engines.pools.values()
    return all(one.can(Capability.GRAMMARS) for one in answering)
