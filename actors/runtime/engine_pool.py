"""Engines as a rollout worker or evaluator sees them: which are ready, with which weights, how loaded."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from actors.runtime.actor import Context
from asyncrl.bus.log import Record, read_last_of_each
from asyncrl.engine.answer import OnTokens
from asyncrl.engine.client import EngineClient, Generation, SamplingParams
from asyncrl.engine.errors import EngineError
from asyncrl.engine.scripted import ScriptedClient
from topics.engines import ENGINE_GONE, ENGINE_READY, ENGINE_UPDATING, EngineReady
from topics.topic import ENGINES, Topic
from topics.wire import Int32Array, WireError

_ADDRESS = re.compile(r"^https?://([A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:\d{1,5})?(/[\w./-]*)?\Z", re.ASCII)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0  # between two questions whether an engine is well again


class Sampler(Protocol):
    """A source of generations: a client of an inference server."""

    async def generate(
        self,
        input_ids: Int32Array,
        sampling: SamplingParams,
        *,
        extra_key: str | None = None,
        on_tokens: OnTokens | None = None,
        stream_interval: int = 16,
        alone: bool = False,
    ) -> Generation:
        """Sample a continuation."""
        ...

    async def close(self) -> None:
        """Close its connections."""
        ...


class Engine:
    """One inference server."""

    def __init__(self, engine_id: str, address: str, client: Sampler) -> None:
        self.engine_id = engine_id
        self.address = address
        self.client = client
        self.scripted = isinstance(client, ScriptedClient)
        self.exact = not self.scripted  # tokens of a request all come from the version it was sent to
        self.ready: EngineReady | None = None  # None: updating, gone, or not answering
        self.running = 0  # requests of this worker
        self.num_messages = 0  # facts it has published
        self.checking = False  # its health is being asked for
        self.doubts = 0  # number of health checks since it last returned tokens

    @property
    def load(self) -> float:
        """This worker's requests there, as a share of what the server runs at once."""
        return self.running / max(1, self.ready.slots) if self.ready is not None else 0.0


class EnginePool:
    """Follows the state that engines publish and hands out the least loaded one."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._engines: dict[str, Engine] = {}
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = context.listen(ENGINES, self._fold)

    async def start(self) -> None:
        """Take the newest state of each engine, and follow the log from there: its length does not matter."""
        bus = self._context.bus
        subjects = [topic.pattern(bus.run) for topic in (ENGINE_UPDATING, ENGINE_READY, ENGINE_GONE)]
        newest = sorted(await read_last_of_each(bus, ENGINES, subjects), key=lambda record: record.sequence)
        for record in newest:
            self._listener.subscribe(record)
        await self._listener.handed_over()
        await self._listener.start(newest[-1].sequence if newest else 0)

    async def close(self) -> None:
        """Stop following and close all connections."""
        await self._listener.close()
        for engine in self._engines.values():
            await engine.client.close()

    async def choose(self, min_version: int) -> Engine:
        """Take a place on the least loaded engine that is ready with at least this version; waits until there is one.

        Give the place back with `release`.
        """
        while (engine := self._least_loaded(min_version)) is None:
            async with self._changed:
                if self._least_loaded(min_version) is None:  # nothing came while waiting for the lock
                    await self._changed.wait()
        engine.running += 1
        return engine

    def release(self, engine: Engine) -> None:
        """Release a slot; another caller may wait for it."""
        engine.running -= 1
        if engine.ready is not None and engine.running == engine.ready.slots - 1:
            self._wake()

    def _least_loaded(self, min_version: int) -> Engine | None:
        ready = [
            engine
            for engine in self._engines.values()
            if engine.ready is not None and engine.ready.version >= min_version and engine.running < engine.ready.slots
        ]
        return min(ready, key=lambda engine: engine.load) if ready else None

    def suspect(self, engine: Engine, *, mislabelled: bool = False) -> None:
        """Send an engine no more requests until it is healthy again, with the weights it announced.

        Args:
            mislabelled: its tokens came from other weights; else it did not answer, or is not well.
        """
        announced, engine.ready = engine.ready, None
        if announced is not None and isinstance(engine.client, EngineClient):
            confirming = self._confirm(engine, engine.client, announced, mislabelled=mislabelled)
            self._context.watch(asyncio.create_task(confirming))

    def mislabelled(self, engine: Engine, label: str) -> None:
        """Note that an engine sampled with other weights than were asked for. If it has announced an update since, the
        request was merely late."""
        if engine.ready is not None and engine.ready.key != label:
            self.suspect(engine, mislabelled=True)

    def check(self, engine: Engine) -> None:
        """A request failed: ask the engine for its health, beside the work that goes on."""
        if not engine.checking and isinstance(engine.client, EngineClient):
            engine.checking = True
            self._context.watch(asyncio.create_task(self._check(engine, engine.client)))

    async def _check(self, engine: Engine, client: EngineClient) -> None:
        try:
            if not await client.health():
                self.suspect(engine)
        finally:
            engine.checking = False

    async def _confirm(
        self, engine: Engine, client: EngineClient, announced: EngineReady, *, mislabelled: bool
    ) -> None:
        """Poll until the server is healthy or the engine has published: no event announces the end of a fault."""
        num_messages = engine.num_messages
        while True:
            engine.doubts += 1
            await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(engine.doubts - 1, 10)))
            if engine.num_messages != num_messages or self._context.stop.is_set():
                return
            if mislabelled:  # and it is no update, which would have been published by now
                self._context.vitals["mislabelled_at_s"] = time.time()
                mislabelled = False
            with contextlib.suppress(EngineError):
                well = await client.health() and (await client.model_info()).get("weight_version") == announced.key
                if engine.num_messages == num_messages and well:
                    engine.ready = announced
                    await self._notify()
                    return

    def _fold(self, topic: Topic[Any], message: Any, _: Record) -> None:
        engine = self._engines.get(message.engine_id)
        if engine is not None:
            engine.num_messages += 1
        if topic is ENGINE_READY:
            if engine is None or engine.address != message.address:
                client = self._open(message.address)
                self._retire(message.engine_id)
                engine = self._engines[message.engine_id] = Engine(message.engine_id, message.address, client)
            engine.ready, engine.doubts = message, 0
            if isinstance(engine.client, ScriptedClient):
                engine.client.now_at(message.key)
        elif topic is ENGINE_GONE:
            self._retire(message.engine_id)
        elif engine is not None and topic is ENGINE_UPDATING:
            engine.ready = None
        self._wake()

    def _retire(self, engine_id: str) -> None:
        """An engine left, or has another address: what is under way there goes on elsewhere."""
        engine = self._engines.pop(engine_id, None)
        if engine is not None:
            engine.ready = None
            self._spawn(engine.client.close())

    def _open(self, address: str) -> Sampler:
        settings = self._context.config.engine
        if address.startswith("scripted:") and settings.kind == "scripted":
            return ScriptedClient(
                mean_s=settings.scripted_mean_s, sigma=settings.scripted_sigma, tokens=settings.scripted_tokens
            )
        if not _ADDRESS.match(address):
            raise WireError(f"{address!r} is no address of an engine; expected http://host:port")
        return EngineClient(address, api_key=self._context.files.engine_key(self._context.config))

    def _wake(self) -> None:
        self._spawn(self._notify())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def version_of(key: str) -> tuple[int, int]:
    """Line and version of an engine's weights name `lineage:version:digest`."""
    lineage, version, _ = key.split(":", 2)
    return int(lineage), int(version)
