"""Servers whose answers are given in advance."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from asyncrl.data.model_dir import ModelInfo
from asyncrl.engine.answer import Chunk, Generation, OnTokens, VersionSpan
from asyncrl.engine.client import SamplingParams
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.generator import Generator
from topics.engines import EngineReady
from topics.trajectories import Answer
from topics.wire import Int32Array

CONTEXT = 128  # of the server
KEY = "0:0:made"


def ready(address: str, version: int = 0, *, engine: str = "engine-1", slots: int = 32) -> EngineReady:
    return EngineReady(engine, address, 0, version, "made", slots)


def never(error: BaseException) -> None:
    raise error


class Scripted:
    """A second implementation of what a fleet samples from: its answers are given by the test."""

    exact = True
    apart = False

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int, str | None]] = []  # tokens, budget, weights
        self.answers: list[Callable[[], Generation]] = []
        self.version, self.well, self.closed = KEY, True, False

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
        self.asked.append((input_ids.tolist(), sampling.max_new_tokens, extra_key))
        generation = self.answers.pop(0)() if self.answers else some(sampling.max_new_tokens, extra_key or "")
        for span in generation.weight_versions if on_tokens is not None else []:
            part = slice(span.start, span.end)
            on_tokens(Chunk(generation.token_ids[part], generation.logprobs[part], span.version))
        await asyncio.sleep(0)
        return generation

    async def health(self) -> bool:
        return self.well

    async def label(self) -> str:
        return self.version

    def announced(self, key: str) -> None:
        self.version = key

    async def close(self) -> None:
        self.closed = True


def some(count: int, label: str = KEY, finish: Any = "length") -> Generation:
    tokens = np.arange(count, dtype=np.int32) % 30 + 3
    return Generation(tokens, np.full(count, -1.0, np.float32), [VersionSpan(label, 0, count)] if count else [], finish)


def failing(error: Exception) -> Callable[[], Generation]:
    def fail() -> Generation:
        raise error

    return fail


class Servers:
    """A fleet of scripted servers and a generator over it."""

    def __init__(self, reserved: Callable[[str], bool] = lambda _: False) -> None:
        self.clients: dict[str, Scripted] = {}
        self.counts: dict[str, float] = {}
        self.fleet = Fleet(self._open, counts=self.counts, fail=never, reserved=reserved)
        shape = ModelInfo("any", 64, CONTEXT)
        self.generator = Generator(self.fleet, shape, str, counts=self.counts)
        self.ids = np.arange(3, 8, dtype=np.int32)

    def _open(self, _engine_id: str, address: str) -> Scripted:
        return self.clients.setdefault(address, Scripted())

    def start(self, address: str, version: int = 0) -> Scripted:
        self.fleet.apply(ready(address, version, engine=address))
        return self.clients[address]

    async def generate(self, most: int = 20, **expected: Any) -> Answer:
        async with asyncio.timeout(120):
            return await self.generator.generate(self.ids, SamplingParams(most), **expected)
