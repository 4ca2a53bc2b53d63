"""The engine actor: one inference server, its versions, and what others may know of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

from actors.actor import ActorDown, Context
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.talk import say
from asyncrl.crash import crash_point
from asyncrl.engine.client import EngineClient, EngineRefused, EngineUnavailable
from asyncrl.engine.launch import EngineFailed, EngineProcess
from topics.engines import ENGINE_GONE, ENGINE_READY, ENGINE_UPDATING, EngineGone, EngineReady, EngineUpdating
from topics.topic import TRAINING, Topic
from topics.weights import WEIGHTS_PUBLISHED, WeightsPublished
from topics.wire import Message, WireError, decode

_ABORT_AGAIN_S = 0.5  # a server that is not idle by then has got requests after the abort


async def main(context: Context) -> None:
    """Play the engine until asked to stop."""
    await EngineActor(context).run()


class EngineActor:
    """Follows `weights.published` in its order (not by the integer) and brings the server to the newest."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.settings = context.cast.engine
        self._target: WeightsPublished | None = None
        self._news = asyncio.Event()
        self._loaded = ""  # key of the weights the server has confirmed
        self._server: EngineProcess | None = None
        self._client: EngineClient | None = None
        self._address = ""
        self._reader = LogReader(
            context.bus, TRAINING, self._on_published, subjects=[WEIGHTS_PUBLISHED.pattern(context.bus.run)]
        )

    async def run(self) -> None:
        """Start (or find) the server, then follow the weights."""
        await self._reader.start()
        stop = asyncio.create_task(self.context.stop.wait())
        try:
            await self._open()
            while not self.context.stop.is_set():
                target = self._target
                if target is not None and target.key != self._loaded:
                    await self._update(target)
                    continue
                self._news.clear()
                news = asyncio.create_task(self._news.wait())
                await asyncio.wait({news, stop}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
        except (EngineFailed, EngineUnavailable, EngineRefused) as error:
            raise ActorDown(f"engine {self._address or self.settings.kind}: {error}") from error
        finally:
            stop.cancel()
            await self._leave()

    def _on_published(self, record: Record) -> None:
        try:
            self._target = decode(WeightsPublished, record.data)
        except WireError as error:
            self.context.watch(asyncio.ensure_future(self.context.bury(record, str(error))))
            return
        self._news.set()

    async def _open(self) -> None:
        settings = self.settings
        if settings.kind == "scripted":
            self._address = f"scripted:{self.context.actor_id}"
            return
        if settings.kind == "external":
            number = int(self.context.actor_id.rsplit("-", 1)[1])
            self._address = settings.addresses[number - 1]
        else:
            self._server = EngineProcess(settings, self.context.files.logs / f"{self.context.actor_id}.server.log")
            model = self.context.files.model_path(self.context.cast)
            self._address = await self._server.start(model, "none")
            self.context.watch(asyncio.create_task(self._watch_server(self._server)))
        key_file = self.context.files.base / settings.api_key_file
        key = key_file.read_text().strip() if settings.api_key_file else None
        self._client = EngineClient(self._address, api_key=key, control_timeout_s=settings.update_deadline_s)

    async def _watch_server(self, server: EngineProcess) -> None:
        words = await server.wait()
        if not self.context.stop.is_set():
            raise EngineFailed(f"the server ended: {words}")

    async def _update(self, target: WeightsPublished) -> None:
        """Bring the server to a version: requests come back with their partial tokens, then the weights are swapped.

        Raises:
            EngineUnavailable, EngineRefused: the server is gone, or does not take the version.
        """
        began = time.monotonic()
        engine_id = self.context.actor_id
        await self._say(ENGINE_UPDATING, EngineUpdating(engine_id, target.line, target.version))
        crash_point("engine.updating")
        if self._client is not None:
            client, deadline = self._client, self.settings.update_deadline_s
            async with asyncio.timeout(deadline):
                await self._empty(client)
                await client.pause("in_place")
                crash_point("engine.paused")
                # Nothing runs: old caches stay behind under their own extra_key and need no flush.
                await client.update_weights(Path(target.location), target.key, False)
                await client.continue_generation()
                confirmed = (await client.model_info()).get("weight_version")
            if confirmed != target.key:
                raise EngineFailed(f"the server says it has weights {confirmed!r}, expected {target.key!r}")
        crash_point("engine.swapped")
        self._loaded = target.key
        seconds = round(time.monotonic() - began, 4)
        self.context.vitals.update(version=target.version, update_s=seconds)
        ready = EngineReady(
            engine_id, self._address, target.line, target.version, target.digest, self.settings.max_running, seconds
        )
        await self._say(ENGINE_READY, ready)

    @staticmethod
    async def _empty(client: EngineClient) -> None:
        """Get every request's partial answer back, also of those sent before their worker heard of the update."""
        while True:
            await client.abort_all()
            with contextlib.suppress(EngineUnavailable):
                return await client.wait_idle(_ABORT_AGAIN_S)

    async def _say(self, topic: Topic[Any], message: Message) -> None:
        await say(
            self.context.bus, topic, message, key=self.context.actor_id, id=f"{self.context.actor_id}:{time.time_ns()}"
        )

    async def _leave(self) -> None:
        await self._say(ENGINE_GONE, EngineGone(self.context.actor_id, "stopped"))
        await self._reader.close()
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            await self._server.stop()
