"""The engine actor: one inference server, its versions, and what others may know of it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec

from actors.engine.fetch import Fetcher
from actors.engine.launch_spec import home_of
from actors.engine.load_report import announced, watch_load
from actors.engine.lora_base import Adapting
from actors.engine.pinned_version import Announced, Versions, is_untrained, versions_of
from actors.engine.shared_gpu import SharedGpu
from actors.engine.update_pace import UpdatePace, first_sequence
from actors.engine.weight_transfer import DirectFailed, WeightTransfer
from actors.runtime.actor import VITALS_S, ActorDown, Context
from asyncrl.background import all_of, first_of, unless
from asyncrl.bus.blobs import BlobMissing
from asyncrl.bus.log import Record, read_last
from asyncrl.bus.publish import publish, read
from asyncrl.config.devices import shares_with_learner
from asyncrl.crash import crash_point
from asyncrl.engine.client import EngineClient
from asyncrl.engine.control import open_control
from asyncrl.engine.errors import EngineError, EngineRefused, EngineUnavailable
from asyncrl.engine.starting import EngineFailed
from asyncrl.weights.directories import CheckpointError
from asyncrl.weights.verify import TornVersion
from topics.engines import EngineAnnounced, EngineGone, EngineReady, EngineUpdating, version_of
from topics.topic import TRAINING, Topic
from topics.weights import UNTRAINED, WEIGHTS_PUBLISHED, WeightsOffered, WeightsPublished, WeightsRefused
from topics.wire import Message, WireError

_NEWS_S = 2.0  # to learn of a newer version, once an older one is gone
_OVERTAKEN = 3  # versions refused one after another, each older than the newest by then: it is not for their age


async def main(context: Context) -> None:
    """Run the engine until asked to stop."""
    await EngineActor(context, await announced(context)).run()


class EngineActor:
    """Follows `weights.published` in its order (not by the integer) and brings the server to the newest.

    One that serves evaluations alone brings it to the version of the oldest open evaluation, one that serves the
    gateway alone to that of the channel `live`.
    """

    def __init__(self, context: Context, announced: EngineAnnounced | None = None) -> None:
        self.context = context
        self.settings = context.config.engine
        self._target: Announced | None = None
        self._refused: Announced | None = None  # whose bytes could not be taken
        self._overtaken = 0  # versions in a row that were refused, and no longer the newest
        self._seen = 0  # sequence of the newest version that was there at the last look
        self._news = asyncio.Event()
        self._loaded = ""  # key of the weights the server has confirmed
        self._weights = ("", "")  # name and path that it reported then
        self._highest = (-1, -1)  # lineage and version that it has had
        self._found = ""  # its own label for them, where another client had relabelled it
        self._answers = True
        self._held = False  # it samples nothing
        self._updating = False  # a server may answer slowly during an update; the update has its own deadline
        config, home = context.config, home_of(context, announced, UNTRAINED.key)
        self._slots = home.group.max_running if announced is None else announced.slots
        self._server = open_control(home)
        self._fetcher = Fetcher(context.bus, context.files, Adapting(home.model, merges=not self._server.adds))
        self._pinned, followed = versions_of(config, context.actor_id)
        self._pace = UpdatePace(config.weights.min_interval_s if self._pinned is None else 0.0)
        # Only the newest version is in the learner's memory.
        direct = config.weights.transport != "never" and isinstance(self._server, EngineClient) and not self._pinned
        self._direct = WeightTransfer(context, home.group, self._server) if direct else None  # type: ignore[arg-type]
        turns = config.placement.colocate == "time_slice" and shares_with_learner(config, context.actor_id)
        self._gpu = SharedGpu(context, self._news) if turns else None
        self._listeners = [context.listen(TRAINING, self._on_published, [WEIGHTS_PUBLISHED])]
        if self._pinned is not None:
            self._listeners = [context.listen(stream, self._on_pinned, topics) for stream, topics in followed]

    async def run(self) -> None:
        """Start (or find) the server, then follow the weights."""
        first = await first_sequence(self.context.bus) if self._pinned is None else 1
        for listener in self._listeners:
            await listener.start(first - 1)  # those before do not matter
        probes: list[asyncio.Task[None]] = []
        try:
            if self._direct is not None:
                await self._direct.start()
            if self._gpu is not None:
                await self._gpu.start()
                if not await self._gpu.take():
                    return
            await unless(self.context.stop, self._server.start())
            if self.context.stop.is_set():
                return
            watches = (self._watch_end(), self._probe(), watch_load(self._server, self.context.vitals))
            probes = [self.context.tasks.start(watch) for watch in watches]
            await all_of(*(listener.caught_up() for listener in self._listeners))  # those between may be pruned by now
            if self._target is None and is_untrained(self.context.config, self.context.actor_id):
                self._target = Announced(UNTRAINED, 0)  # no weights will be published
            while not self.context.stop.is_set():
                target = self._target
                self._news.clear()
                if self._gpu is not None and self._gpu.wanted:
                    await self._pass_gpu(self._gpu)
                    continue
                pause_s = self._pace.pause_s() if target is not None and self._wants(target) else None
                if target is not None and pause_s == 0:
                    await (self._bring(target) if self._server.own else unless(self.context.stop, self._bring(target)))
                    continue
                await first_of(self._news.wait(), self.context.stop.wait(), timeout_s=pause_s)
        except (EngineFailed, EngineError) as error:
            name = f"engine {self._server.address}: "
            raise ActorDown(name + str(error).removeprefix(name)) from error
        finally:
            for task in probes:
                task.cancel()
            await self._leave()

    def _wants(self, target: Announced) -> bool:
        return target.version.key != self._loaded and target != self._refused and self._answers

    def _on_published(self, _topic: Topic[Any], published: WeightsPublished, record: Record) -> None:
        if self._target is not None and record.sequence <= self._target.sequence:
            return  # it was looked for before it came
        self._fetcher.check(published)
        self._fetcher.note(published)
        self._target = Announced(published, record.sequence)
        self._news.set()

    def _on_pinned(self, topic: Topic[Message], message: Message, record: Record) -> None:
        assert self._pinned is not None
        if isinstance(message, WeightsPublished):
            self._fetcher.check(message)
        self._pinned.apply(topic, message, record)
        self._follow(self._pinned)

    def _follow(self, versions: Versions) -> None:
        """Target the version that the engine shall have; keep the present target if there is none."""
        wanted = versions.wanted()
        if wanted is not None and wanted != self._target:
            for version in versions.chain(wanted):
                self._fetcher.note(version)
            self._target = wanted
            self._news.set()

    async def _look(self) -> None:
        """Look for a newest version whose message has not come since the last look."""
        record = await read_last(self.context.bus, WEIGHTS_PUBLISHED)
        known = self._target.sequence if self._target is not None else 0
        if record is None or self._pinned is not None or record.sequence <= known:
            return
        seen, self._seen = self._seen, record.sequence
        if seen == record.sequence:
            with contextlib.suppress(WireError, BlobMissing):  # the listener rejects it
                message = await read(self.context.bus, WeightsPublished, record)
                self._on_published(WEIGHTS_PUBLISHED, message, record)

    async def _watch_end(self) -> None:
        words = await self._server.ended()
        if not self.context.stop.is_set():
            raise EngineFailed(f"the server ended: {words}")

    async def _probe(self) -> None:
        """Ask the server for its health all the time: a frozen one takes requests and answers none."""
        lease_s, answered_at = self.context.config.supervision.silence_s, time.monotonic()
        while True:
            began = time.monotonic()
            with contextlib.suppress(TimeoutError, EngineError):
                async with asyncio.timeout(lease_s / 2):
                    if await self._server.health():
                        answered_at = time.monotonic()
                        self.context.vitals["answered_at_s"] = time.time()
                        await self._compare()
                        await self._look()
            if self._updating and not self._server.frozen:
                answered_at = time.monotonic()  # it may not answer while it loads, for engine.update_deadline_s
            silent_s = began - answered_at
            if silent_s > lease_s and self._answers:
                words = f"its server at {self._server.address} has not answered for {silent_s:.0f} s"
                if self._server.own:
                    self._server.kill()
                    raise ActorDown(f"{words}; it is killed")
                await self._lose(words)
            elif silent_s < 0 and not self._answers:
                self._answers = True
                self._news.set()
            await asyncio.sleep(lease_s / 4)

    async def _compare(self) -> None:
        """Ask the server which weights it has, and load them again if another client restarted or changed it."""
        loaded, weights = self._loaded, self._weights
        found = await self._server.weights()
        if loaded == UNTRAINED.key:
            return  # an external server has its own name for the weights that it serves
        if loaded and found != weights and (self._loaded, self._weights) == (loaded, weights) and not self._updating:
            label, path = found
            self.context.count("relabelled")
            self.context.log.warning("server has other weights", found=(label[:80], path[:1024]), expected=weights)
            self._loaded, self._found = "", label if label != loaded else f"{label} from {path}"
            self._news.set()

    async def _lose(self, words: str) -> None:
        """Wait for an external server that is away: it gets its weights again when it is back."""
        self._answers, self._loaded = False, ""
        await publish(self.context.bus, EngineGone(self.context.actor_id, words))

    async def _bring(self, target: Announced) -> None:
        """Bring the server to a version, unless it is overtaken by a newer one, or the server is away.

        Raises:
            EngineError, EngineFailed: the server does not take the newest version; or our own server is gone.
        """
        try:
            if target.version is UNTRAINED:
                await self._server.weights()  # it answers
                self._loaded = target.version.key
                await self._publish_ready(target.version)
                return
            began = time.monotonic()
            offer = await self._direct.ask(target.version, self._loaded) if self._direct is not None else None
            source = offer or await self._directory(target.version)
            if isinstance(source, Path):
                await self._server.prepare(source)
            fetch_s = time.monotonic() - began
            await self._server.wait_gap()
            directory = await self._update(target.version, source, fetch_s)
            if directory is not None:
                self._fetcher.release(keep=directory)
        except (EngineRefused, TornVersion) as error:
            await self._refuse(target, error)
        except EngineUnavailable as error:
            if self._server.own:
                raise
            await self._lose(f"its server was away when it should load version {target.version.version}: {error}")
        finally:
            self._updating = False
            if self._direct is not None:
                await self._direct.give_back()

    async def _directory(self, version: WeightsPublished) -> Path:
        """Fetch a version to this host, while the server continues with the version before."""
        deadline = self.settings.update_deadline_s
        try:
            async with asyncio.timeout(deadline):
                return await self._fetcher.directory(version)
        except TimeoutError:
            words = f"version {version.version} was not fetched within engine.update_deadline_s = {deadline:g} s"
            raise EngineFailed(words) from None
        except (CheckpointError, OSError) as error:
            if self._pinned is not None:  # it may be gone from the store: another one may be asked for
                raise TornVersion(str(error)) from error
            raise EngineFailed(f"version {version.version} could not be fetched: {error}") from error

    async def _refuse(self, target: Announced, error: EngineRefused | TornVersion) -> None:
        """Keep the server's version; ask for the refused one again, unless a newer version does not build on it.

        A newer difference that builds on it would be refused, too.

        Raises:
            EngineFailed: it is the newest, and its bytes were refused before; or the server takes no version at all.
        """
        if self._pinned is not None:
            self._pinned.pass_over(target)
            self._follow(self._pinned)
            await self._publish_refused(target, error)
            return
        version = target.version
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_NEWS_S):
                while self._target is target:
                    self._news.clear()
                    await self._news.wait()
        newest = self._target
        overtaken = newest is not None and newest is not target and not (version.base and newest.version.base)
        self._overtaken = self._overtaken + 1 if overtaken else 0
        if overtaken and self._overtaken < _OVERTAKEN:
            self.context.log.info("older weights were refused", version=version.version, reason=str(error))
            return
        if overtaken or version.answers:
            again = f"like {_OVERTAKEN - 1} before it" if overtaken else "twice"
            raise EngineFailed(f"version {version.version} was refused {again}: {error}") from error
        await self._publish_refused(target, error)

    async def _publish_refused(self, target: Announced, error: EngineRefused | TornVersion) -> None:
        version, self._refused = target.version, target
        self.context.count("versions_refused")
        self.context.log.error("weights refused", version=version.version, reason=str(error))
        about = (self.context.actor_id, version.lineage, version.version, target.sequence, str(error)[:1024])
        await publish(self.context.bus, WeightsRefused(*about))

    async def _update(self, target: WeightsPublished, source: Path | WeightsOffered, fetch_s: float) -> Path | None:
        """Swap the weights, under the requests that run or after they have come back with their partial tokens.

        Args:
            source: directory, or the version in the learner's memory.

        Returns:
            The directory that they were loaded from.
        """
        began, engine_id = time.monotonic(), self.context.actor_id
        self._updating, self._loaded = True, ""  # wherever this ends: it may have a part of them, and is on hold
        updating = EngineUpdating(engine_id, target.lineage, target.version, found=self._found[:1024])
        await publish(self.context.bus, updating)
        crash_point("engine.updating")
        server, deadline = self._server, self.settings.update_deadline_s
        try:
            async with asyncio.timeout(deadline):
                self._held, paused = True, time.monotonic()
                await server.hold(keep=self.context.config.weights.update == "in_place" and self._pinned is None)
                crash_point("engine.paused")
                held = time.monotonic()
                directory = await self._load(target, source)
                loaded = time.monotonic()
                await server.resume()
                self._held, pause_s = False, time.monotonic() - paused
                self._weights = await server.weights()
        except TimeoutError:
            words = f"version {target.version} was not loaded within engine.update_deadline_s = {deadline:g} s"
            raise EngineFailed(words) from None
        if (confirmed := self._weights[0]) != target.key:
            raise EngineFailed(f"the server reports weights {confirmed[:80]!r}, expected {target.key!r}")
        crash_point("engine.swapped")
        self._loaded, self._found, self._overtaken = target.key, "", 0
        way = self._direct.kind if directory is None and self._direct is not None else ""
        seconds = {"update_s": time.monotonic() - began, "fetch_s": fetch_s, "pause_s": pause_s}
        seconds |= {"hold_s": held - paused, "load_s": loaded - held}
        await self._publish_ready(target, direct=way, **seconds)
        return directory

    async def _pass_gpu(self, gpu: SharedGpu) -> None:
        """Let the learner have the GPU; what comes next loads the weights again."""
        lineage, version = version_of(self._loaded) if self._loaded else (0, 0)
        self._loaded, self._held, self._updating = "", True, True
        await publish(self.context.bus, EngineUpdating(self.context.actor_id, lineage, version))
        await gpu.leave_for_learner(self._server, self.settings.update_deadline_s)
        self._updating = False
        if await gpu.take():
            newest = self._target.version if self._target is not None else None
            await gpu.resume(self._server, self._fetcher.ahead(newest, self.settings.update_deadline_s))

    async def _load(self, target: WeightsPublished, source: Path | WeightsOffered) -> Path | None:
        """Load a version into the server, which is held: from the store where the direct way fails."""
        if self._direct is not None and isinstance(source, WeightsOffered):
            try:
                await self._direct.load(source)
                return None
            except DirectFailed:
                source = await self._directory(target)
        assert isinstance(source, Path)
        await self._server.load_weights(source, target.key)
        return source

    async def _publish_ready(self, target: WeightsPublished, *, direct: str = "", **seconds: float) -> None:
        self.context.vitals.update(version=target.version, **seconds)
        ready = EngineReady(
            self.context.actor_id,
            self._server.address,
            target.lineage,
            target.version,
            target.digest,
            self._slots,
            delta=bool(target.base) and not direct,
            direct=direct,
            adapter=self._server.adapter,
            fallback="" if direct or self._direct is None else self._direct.failure,
        )
        ready = msgspec.structs.replace(ready, **{name: round(value, 4) for name, value in seconds.items()})
        # Other weights may have filled the cache under this key: those of its owner or another client, or the ones
        # that replaced it before, by which requests were sampled that came late.
        if not self._server.own or (target.lineage, target.version) <= self._highest:
            ready.cache = secrets.token_hex(4)
        self._highest = max(self._highest, (target.lineage, target.version))
        await publish(self.context.bus, ready)
        self._pace.updated()

    async def _leave(self) -> None:
        await publish(self.context.bus, EngineGone(self.context.actor_id, "stopped", asked=True))
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(VITALS_S):
                if self._server.own:
                    await self._server.drain()  # what runs comes back with all its tokens
                elif self._held:
                    await self._server.resume()  # its owner finds it as it was
        for listener in self._listeners:
            await listener.close()
        if self._direct is not None:
            await self._direct.close()
        await self._server.close()
        if self._gpu is not None:
            await self._gpu.close()
        self._fetcher.close()
