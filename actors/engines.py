"""The engines as a rollout worker or evaluator sees them: who is ready, with which weights, how loaded."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from typing import Any, Protocol

from actors.actor import Context
from asyncrl.bus.log import Record
from asyncrl.engine.client import Chunk, EngineClient, Generation, SamplingParams
from asyncrl.engine.errors import EngineError
from asyncrl.engine.scripted import ScriptedClient
from topics.engines import ENGINE_GONE, ENGINE_READY, ENGINE_UPDATING, EngineReady
from topics.topic import ENGINES, Topic
from topics.wire import Int32Array, WireError

_ADDRESS = re.compile(r"^https?://([A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:\d{1,5})?(/[\w./-]*)?\Z", re.ASCII)


class Sampler(Protocol):
    """What generates: a client of an inference server."""

    async def generate(
        self,
        input_ids: Int32Array,
        sampling: SamplingParams,
        *,
        extra_key: str | None = None,
        on_tokens: Callable[[Chunk], None] | None = None,
        stream_interval: int = 16,
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
        self.words = 0  # facts it has said

    @property
    def load(self) -> float:
        """This worker's requests there, as a share of what the server runs at once."""
        return self.running / max(1, self.ready.slots) if self.ready is not None else 0.0


class EnginePool:
    """Follows what engines say of themselves and hands out the least loaded one."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._engines: dict[str, Engine] = {}
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = context.listen(ENGINES, self._fold)
        settings = context.cast.engine
        key_file = context.files.base / settings.api_key_file
        self._api_key = key_file.read_text().strip() if settings.api_key_file else None

    async def start(self) -> None:
        """Begin to follow."""
        await self._listener.start()

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
        """Give a place back; somebody may wait for it."""
        engine.running -= 1
        if engine.ready is not None and engine.running == engine.ready.slots - 1:
            self._tell()

    def _least_loaded(self, min_version: int) -> Engine | None:
        ready = [
            engine
            for engine in self._engines.values()
            if engine.ready is not None and engine.ready.version >= min_version and engine.running < engine.ready.slots
        ]
        return min(ready, key=lambda engine: engine.load) if ready else None

    def suspect(self, engine: Engine) -> None:
        """An engine did not answer: no more requests to it until it does, with the weights it said it has."""
        said, engine.ready = engine.ready, None
        if said is not None and isinstance(engine.client, EngineClient):
            self._context.watch(asyncio.create_task(self._probe(engine, engine.client, said)))

    async def _probe(self, engine: Engine, client: EngineClient, said: EngineReady) -> None:
        """Ask until the server answers or the engine has said something new: nothing else tells that a fault passed."""
        words, pause = engine.words, 0.2
        while engine.words == words and not self._context.stop.is_set():
            await asyncio.sleep(pause)
            pause = min(5.0, pause * 2)
            with contextlib.suppress(EngineError):
                key = (await client.model_info()).get("weight_version")
                if engine.words == words and key == said.key:
                    engine.ready = said
                    await self._notify()
                    return

    def _fold(self, topic: Topic[Any], message: Any, _: Record) -> None:
        engine = self._engines.get(message.engine_id)
        if engine is not None:
            engine.words += 1
        if topic is ENGINE_READY:
            if engine is None or engine.address != message.address:
                engine = Engine(message.engine_id, message.address, self._open(message.address))
                self._engines[message.engine_id] = engine
            engine.ready = message
            if isinstance(engine.client, ScriptedClient):
                engine.client.now_at(message.key)
        elif engine is not None and (topic is ENGINE_UPDATING or topic is ENGINE_GONE):
            engine.ready = None
        self._tell()

    def _open(self, address: str) -> Sampler:
        settings = self._context.cast.engine
        if address.startswith("scripted:") and settings.kind == "scripted":
            return ScriptedClient(
                mean_s=settings.scripted_mean_s, sigma=settings.scripted_sigma, tokens=settings.scripted_tokens
            )
        if not _ADDRESS.match(address):
            raise WireError(f"{address!r} is no address of an engine; expected http://host:port")
        return EngineClient(address, api_key=self._api_key)

    def _tell(self) -> None:
        task = asyncio.create_task(self._notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def version_of(key: str) -> tuple[int, int]:
    """Line and version of an engine's weights name `line:version:digest`."""
    line, version, _ = key.split(":", 2)
    return int(line), int(version)
