"""The announcement that an engine actor reads before it starts, and the load that it reports while its server runs."""

from __future__ import annotations

import asyncio
import contextlib
import time

from actors.runtime.actor import VITALS_S, ActorFault, Context
from asyncrl.bus.merged_reader import newest_message
from asyncrl.engine.control import EngineControl
from asyncrl.engine.errors import EngineError
from asyncrl.engine.server_load import EngineLoad
from topics.engines import ANNOUNCED, ENGINE_ANNOUNCED, EngineAnnounced


async def announced(context: Context) -> EngineAnnounced | None:
    """The announcement of this engine; None for one of the config."""
    if not context.actor_id.startswith(ANNOUNCED):
        return None
    newest = await newest_message(context.bus, ENGINE_ANNOUNCED, context.actor_id)
    if newest is None:
        raise ActorFault(f"{context.actor_id} was never announced; `asyncrl engines add URL` does it")
    return newest[0]


async def watch_load(server: EngineControl, vitals: dict[str, float]) -> None:
    """Report in the vital signs when the server last answered, when it was last idle or advanced, and its caches."""
    last = EngineLoad(0, 0)
    vitals["answered_at_s"] = vitals["moved_at_s"] = time.time()
    while True:
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(VITALS_S):
                load = await server.load()
            now = vitals["answered_at_s"] = time.time()
            # A paused server adds new requests to its queue, but no token to its caches.
            if not load.requests or load.tokens != last.tokens:
                vitals["moved_at_s"] = now
            vitals["requests"], last = load.requests, load
            for name, share in (("cache_share", load.cache_share), ("cache_hit_share", load.hit_share)):
                if share is not None:
                    vitals[name] = round(share, 4)
        await asyncio.sleep(VITALS_S)
