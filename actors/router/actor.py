"""The router actor: `sglang-router` in front of the engines, as one engine for those that sample."""

from __future__ import annotations

import asyncio
import time

import xxhash

from actors.runtime.actor import ActorDown, Context
from actors.runtime.engines import follow_engines
from asyncrl.background import first_of
from asyncrl.bus.publish import publish
from asyncrl.config.pools import purpose_of
from asyncrl.engine.control import read_key
from asyncrl.engine.errors import EngineError
from asyncrl.engine.fleet import EngineNews
from asyncrl.engine.router import Member, Router, member_of
from asyncrl.engine.starting import EngineFailed
from topics.engines import EngineGone, EngineReady, EngineUpdating
from topics.roles import number_in_pool, role_of

_POLL_S, _SOON_S = 5.0, 0.05  # between two looks at the engines that the router has; until it has those wanted
_OTHERS_S = 1.0  # from the first engine that answers the router until the others are not waited for


async def main(context: Context) -> None:
    """Run the router until asked to stop."""
    await RouterActor(context).run()


class RouterActor:
    """Follows the engines, connects those with the newest weights to the router, and publishes the router as an engine.

    All engines of the router have the same weights, so a request names the weights without knowing which engine will
    serve it.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._settings = context.config.engine
        self._engines: dict[str, EngineReady] = {}  # those that take requests
        self._coming: tuple[int, int] | None = None  # lineage and version that one of them is taking
        self._published: EngineReady | None = None  # None: requests are held
        self._well_at = 0.0  # when the first of them answered the router; 0.0: none has
        self._news = asyncio.Event()
        log_file = context.files.logs / f"{context.actor_id}.server.log"
        arguments = list(self._settings.router.arguments)
        arguments += ["--pd-disaggregation"] if self._settings.disaggregated else []
        key_file = context.files.key_of(context.actor_id)
        self._router = Router(arguments, log_file, key_file, self._settings.start_deadline_s)

    async def run(self) -> None:
        """Start the router, then follow the engines."""
        listener = None
        try:
            await self._router.start()
            self.context.tasks.start(self._watch_end())
            listener = await follow_engines(self.context, self._take)
            while not self.context.stop.is_set():
                self._news.clear()
                poll_s = await self._reconcile()
                # An engine that did not answer may have joined since, and may no longer have the newest weights.
                await first_of(self._news.wait(), self.context.stop.wait(), timeout_s=poll_s)
        except (EngineFailed, EngineError) as error:
            raise ActorDown(f"router {self._router.address}: {error}") from error
        finally:
            await publish(self.context.bus, EngineGone(self.context.actor_id, "stopped", asked=True))
            if listener is not None:
                await listener.close()
            await self._router.close()

    def _take(self, news: EngineNews) -> None:
        if role_of(news.engine_id) != "engine" or purpose_of(self.context.config, news.engine_id) != "training":
            return  # its own, or one that serves something else alone
        self._settings.group_of(news.engine_id)  # raises ValueError for a name that is none
        if isinstance(news, EngineReady):
            self._engines[news.engine_id] = news
        else:
            self._engines.pop(news.engine_id, None)
            if isinstance(news, EngineUpdating):
                self._coming = (news.lineage, news.version)
        self._news.set()

    async def _watch_end(self) -> None:
        words = await self._router.ended()
        if not self.context.stop.is_set():
            raise ActorDown(f"the router ended: {words}")

    async def _reconcile(self) -> float:
        """Bring the router to the engines that have the newest weights; requests are held while the weights change.

        Returns:
            Seconds until it is to be called again, unless there is news.
        """
        newest = max(self._engines.values(), key=lambda ready: (ready.lineage, ready.version), default=None)
        if newest is None or not self._serves(newest.key):
            await self._hold(self._coming)
            # A prefill server that takes newer weights would compute prompts for a decode server with the older ones.
            out = not self._settings.disaggregated or (await self._router.set_members({})).alone
            return _POLL_S if out else _SOON_S
        members = {name: ready for name, ready in self._engines.items() if ready.key == newest.key}
        ready = self._ready(newest, members)
        if self._published is not None and self._published.key != newest.key:
            await self._hold((newest.lineage, newest.version))
        wanted = [self._member(name, ready.address) for name, ready in members.items()]
        routed = await self._router.set_members({member.address: member for member in wanted})
        if not routed.alone:
            return _SOON_S
        if ready != self._published:
            if not self._answer(len(routed.well), len(members)):
                return _SOON_S
            self._published = ready
            self.context.vitals.update(version=ready.version, engines=len(members))
            await publish(self.context.bus, ready)
        return _POLL_S

    def _answer(self, well: int, members: int) -> bool:
        """Return whether all members answer, or the others have for so long that one is not waited for any more."""
        if not well:
            return False
        self._well_at = self._well_at or time.monotonic()
        return well == members or time.monotonic() - self._well_at > _OTHERS_S

    def _serves(self, key: str) -> bool:
        """Return whether the engines with these weights can answer: of disaggregated ones it takes both roles."""
        roles = {self._settings.group_of(name).role for name, ready in self._engines.items() if ready.key == key}
        return not self._settings.disaggregated or roles >= {"prefill", "decode"}

    def _ready(self, newest: EngineReady, members: dict[str, EngineReady]) -> EngineReady:
        sampling = [ready for name, ready in members.items() if self._settings.group_of(name).role != "prefill"]
        loadings = sorted(f"{name}:{ready.cache}" for name, ready in members.items() if ready.cache)
        return EngineReady(
            self.context.actor_id,
            self._router.address,
            newest.lineage,
            newest.version,
            newest.digest,
            sum(ready.slots for ready in sampling),
            adapter=newest.adapter,
            cache=xxhash.xxh3_64_hexdigest(",".join(loadings).encode()) if loadings else "",
        )

    def _member(self, engine_id: str, address: str) -> Member:
        key = read_key(self.context.files.engine_key_file(self._settings, engine_id))
        number = number_in_pool(engine_id) - 1
        return member_of(self._settings.group_of(engine_id), number, address, key)

    async def _hold(self, coming: tuple[int, int] | None) -> None:
        """Publish that requests are held; running requests return with their partial tokens, or continue."""
        self._well_at = 0.0
        if self._published is not None and coming is not None:
            self._published = None
            await publish(self.context.bus, EngineUpdating(self.context.actor_id, *coming))
