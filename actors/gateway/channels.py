"""The engines that a gateway asks: those of training, or those that hold the channel `live`."""

from __future__ import annotations

from actors.runtime.actor import Context
from actors.runtime.engines import follow_fleet, open_fleet
from asyncrl.bus.listen import Listener
from asyncrl.config.pools import Purpose
from asyncrl.data.model_dir import ModelInfo
from asyncrl.engine.generator import Generator, Manner
from asyncrl.engine.stops import Decode

LIVE_FIRST = 100
"""Priority of requests of the gateway; those of rollouts have 0. SGLang retracts for a difference above 10."""


class Channels:
    """The fleets of a gateway, and what samples from them."""

    def __init__(self, context: Context, served: ModelInfo, decode: Decode) -> None:
        """
        Args:
            served: the model, as engines serve it.
            decode: tokens to text, special tokens included.
        """
        self._context = context
        settings = context.config.gateway
        self._purpose: Purpose = "live" if settings.engines else "training"
        # Engines that hold a version load the next one without requests.
        in_place = context.config.weights.update == "in_place" and self._purpose == "training"
        self._fleet = open_fleet(context)
        manner = Manner(settings.stream_tokens, in_place, priority=LIVE_FIRST)
        self.generator = Generator(self._fleet, served, decode, counts=context.vitals, manner=manner)
        self._listeners: list[Listener] = []

    async def start(self) -> None:
        """Follow the engines."""
        self._listeners.append(await follow_fleet(self._context, self._fleet, purpose=self._purpose))

    async def close(self) -> None:
        """Follow them no more, and close the connections."""
        for listener in self._listeners:
            await listener.close()
        await self._fleet.close()
