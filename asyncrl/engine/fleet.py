"""The engines that may be sampled from: which are ready, with which weights, how loaded."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol, TypeAlias

import xxhash

from asyncrl.background import BackgroundTasks
from asyncrl.engine.answer import Generation, OnTokens
from asyncrl.engine.client import SamplingParams
from asyncrl.engine.errors import EngineError, VersionAbsent
from topics.engines import EngineGone, EngineReady, EngineUpdating
from topics.weights import WeightsRefused
from topics.wire import Int32Array

EngineNews: TypeAlias = EngineUpdating | EngineReady | EngineGone

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0  # between two health checks of an engine that failed
_PARTING_S = 5.0  # that requests at an engine which leaves in order have to come back
_UNEVEN = 1.25  # load of an engine that keeps its groups, as a multiple of an even one
_AT_EASE = 0.125  # load at which every engine does


class Sampler(Protocol):
    """A client of one inference server."""

    exact: bool  # all tokens of a request come from the weights that it names
    apart: bool  # its prompt may come from others, if they changed before its first token

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
        """Sample a continuation; raises EngineError."""

    async def health(self) -> bool:
        """Return whether the server answers and is well."""

    async def label(self) -> str:
        """Return the name of the server's weights; raises EngineError."""

    def announced(self, key: str) -> None:
        """Take note that the server has these weights now."""

    async def close(self) -> None:
        """Cancel running requests and close the connections."""


class Wanted(NamedTuple):
    """The engine that a request is for."""

    version: int = 0  # of its weights, or a newer one
    exact: bool = False  # this version and no other
    group: str = ""  # requests of one group go to one engine, unless it is much busier than the others; "": to any
    first: str = ""  # key: a reserved engine that has it and a free slot, before the others, which are not reserved


class Engine:
    """One inference server."""

    def __init__(self, engine_id: str, address: str, client: Sampler, *, reserved: bool) -> None:
        self.engine_id = engine_id
        self.address = address
        self.client = client
        self.reserved = reserved  # for requests that ask for its weights
        self.ready: EngineReady | None = None  # None: updating, gone, or not answering
        self.running = 0  # requests of this process
        self.checking = False  # its health is being asked for
        self.doubts = 0  # health checks since it last returned tokens
        self.messages = 0  # that it has published

    @property
    def slots(self) -> int:
        """Requests that the server runs at once."""
        return self.ready.slots if self.ready is not None else 1

    def has(self, key: str) -> bool:
        """Return whether it is ready with these weights."""
        return self.ready is not None and self.ready.key == key

    @property
    def load(self) -> float:
        """This process's requests there, as a share of what the server runs at once."""
        return self.running / (self.ready.slots if self.ready is not None else 1)


class Fleet:
    """Hands out ready engines by their published state: one engine for a group, otherwise the least loaded."""

    def __init__(
        self,
        open_client: Callable[[str, str], Sampler],
        *,
        counts: dict[str, float],
        fail: Callable[[BaseException], None],
        reserved: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """
        Args:
            open_client: makes the client of an engine by name and address; raises ValueError for an invalid address.
            counts: gets `mislabelled_at_s`, the time at which an engine was found to have other weights than announced.
            fail: is given an unexpected error of a background task.
            reserved: whether an engine, by its name, takes those requests alone that ask for its weights.
        """
        self._reserved = reserved
        self._open_client = open_client
        self._counts = counts
        self._engines: dict[str, Engine] = {}
        self._refused: dict[int, dict[str, str]] = {}  # why engines could not take a version, by version and engine
        self._changed = asyncio.Event()  # set, and replaced, at each change
        self._tasks = BackgroundTasks(fail)
        self._ready_at = -math.inf  # of the monotonic clock, when an engine was known to be ready last

    @property
    def slots(self) -> int:
        """Return the requests that the engines which are ready run at once, those that sample for training."""
        engines = [engine for engine in self._engines.values() if engine.ready is not None and not engine.reserved]
        return sum(engine.slots for engine in engines)

    @property
    def unready_s(self) -> float:
        """Return for how many seconds no engine was ready; 0 if one is, infinity if none ever was."""
        self._note_ready()
        return max(0.0, time.monotonic() - self._ready_at)

    def _note_ready(self) -> None:
        if any(engine.ready is not None and not engine.reserved for engine in self._engines.values()):
            self._ready_at = math.inf
        elif self._ready_at == math.inf:
            self._ready_at = time.monotonic()

    def apply(self, news: EngineNews) -> None:
        """Fold in what an engine published.

        Raises:
            ValueError: it names no address of an engine.
        """
        engine = self._engines.get(news.engine_id)
        if engine is not None:
            engine.messages += 1
        if isinstance(news, EngineReady):
            if engine is None or engine.address != news.address:
                client = self._open_client(news.engine_id, news.address)
                self._retire(news.engine_id)
                reserved = self._reserved(news.engine_id)
                engine = Engine(news.engine_id, news.address, client, reserved=reserved)
                self._engines[news.engine_id] = engine
            engine.ready, engine.doubts = news, 0
            self._refused.get(news.version, {}).pop(news.engine_id, None)
            engine.client.announced(news.key)
        elif isinstance(news, EngineGone):
            self._retire(news.engine_id, asked=news.asked)
        elif engine is not None:
            engine.ready = None
        self._wake()

    def refuse(self, refused: WeightsRefused) -> None:
        """Take note of a version that an engine cannot have: who wants no other does not wait for that engine."""
        self._refused.setdefault(refused.version, {})[refused.engine_id] = refused.reason
        self._wake()

    async def choose(self, wanted: Wanted, *, avoid: Collection[Engine] = ()) -> Engine:
        """Take a slot of an engine that is ready; waits until there is one. Give the slot back with `release`.

        Args:
            avoid: engines that are chosen only without an alternative.

        Raises:
            VersionAbsent: an exact version is wanted, and every engine that is ready has a newer one, or every engine
                could not take it.
        """
        while (engine := self.take(wanted, avoid=avoid)) is None:
            if wanted.exact and (reason := self._absence(wanted.version)):
                raise VersionAbsent(reason)
            await self._changed.wait()
        return engine

    def take(self, wanted: Wanted, *, avoid: Collection[Engine] = ()) -> Engine | None:
        """Take a slot as `choose` does, if there is one now."""
        engine = self._best(wanted, avoid)
        if engine is not None:
            engine.running += 1
        return engine

    def release(self, engine: Engine) -> None:
        """Give a slot back."""
        engine.running -= 1
        if engine.running == (engine.ready.slots - 1 if engine.ready is not None else 0):
            self._wake()

    def suspect(self, engine: Engine, *, mislabelled: bool = False) -> None:
        """Send an engine no more requests until it is healthy again, with the weights it announced.

        Args:
            mislabelled: its tokens came from other weights; else it did not answer, or is not well.
        """
        announced, engine.ready = engine.ready, None
        self._note_ready()
        if announced is not None:
            self._tasks.start(self._confirm(engine, announced, mislabelled=mislabelled))

    def check(self, engine: Engine) -> None:
        """A request failed: ask an engine with other requests for its health, concurrently."""
        if engine.ready is not None and not engine.checking:
            engine.checking = True
            self._tasks.start(self._check(engine))

    async def close(self) -> None:
        """Close all connections."""
        self._tasks.cancel()
        for engine in self._engines.values():
            await engine.client.close()

    def _absence(self, version: int) -> str:
        """Return why no engine will ever have a version; "" if one may."""
        ready = [engine.ready.version for engine in self._engines.values() if engine.ready is not None]
        if ready and min(ready) > version:
            return f"no engine has version {version} now; the oldest that is ready is {min(ready)}"
        refused = self._refused.get(version, {})
        if refused and self._engines.keys() <= refused.keys():
            name, reason = next(iter(refused.items()))
            return f"{name} could not take version {version}: {reason}"
        return ""

    def _fit(self, wanted: Wanted, avoid: Collection[Engine]) -> list[Engine]:
        """Return the engines that may serve a request: those to avoid only if there are no others."""
        version, exact, _, first = wanted
        fit = [
            engine
            for engine in self._engines.values()
            if (ready := engine.ready) is not None
            and (ready.version == version if exact else ready.version >= version)
            and (not engine.reserved or ready.key == first)
        ]
        firsts = [engine for engine in fit if engine.reserved and engine.load < 1 and engine not in avoid]
        fit = firsts or [engine for engine in fit if not engine.reserved]
        return [engine for engine in fit if engine not in avoid] or fit

    def _best(self, wanted: Wanted, avoid: Collection[Engine]) -> Engine | None:
        fit, group = self._fit(wanted, avoid), wanted.group
        free = [engine for engine in fit if engine.load < 1]
        if group and len(fit) > 1:
            # Rendezvous hashing: every worker finds the same engine, and one that leaves moves its own groups alone.
            even = (1 + sum(engine.running for engine in fit)) / sum(engine.slots for engine in fit)
            bound = max(_UNEVEN * even, _AT_EASE)
            at_ease = [engine for engine in free if engine.load < bound]
            if at_ease:
                return max(at_ease, key=lambda engine: xxhash.xxh3_64_intdigest(f"{group}/{engine.engine_id}".encode()))
        return min(free, key=lambda engine: engine.load) if free else None

    async def _check(self, engine: Engine) -> None:
        try:
            if not await engine.client.health():
                self.suspect(engine)
        finally:
            engine.checking = False

    async def _confirm(self, engine: Engine, announced: EngineReady, *, mislabelled: bool) -> None:
        """Poll until the server is healthy or the engine has published: no event announces the end of a fault."""
        messages = engine.messages
        while True:
            engine.doubts += 1
            await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(engine.doubts - 1, 10)))
            if engine.messages != messages:
                return
            if mislabelled:  # and it is no update, which would have been published by now
                self._counts["mislabelled_at_s"] = time.time()
                mislabelled = False
            with contextlib.suppress(EngineError):
                well = await engine.client.health() and await engine.client.label() == announced.key
                if engine.messages == messages and well:
                    engine.ready = announced
                    self._wake()
                    return

    def _retire(self, engine_id: str, *, asked: bool = False) -> None:
        """An engine left or changed its address: its requests move to other engines.

        Args:
            asked: whether it leaves in order: what runs there comes back with its tokens, for which it has a moment.
        """
        engine = self._engines.pop(engine_id, None)
        if engine is not None:
            engine.ready = None
            self._tasks.start(self._part(engine, _PARTING_S if asked else 0.0))

    async def _part(self, engine: Engine, seconds: float) -> None:
        """Close the connections to an engine, at once or when nothing runs there any more."""
        try:
            async with asyncio.timeout(seconds):
                while engine.running:
                    await self._changed.wait()
        except TimeoutError:
            pass  # it keeps its state
        finally:
            await engine.client.close()

    def _wake(self) -> None:
        self._note_ready()
        self._changed.set()
        self._changed = asyncio.Event()
