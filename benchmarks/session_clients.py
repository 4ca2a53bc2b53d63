"""Sessions without pauses, through a gateway or directly to its engine, and the timing of their replies.

`python -m benchmarks.session_clients SETTINGS`, with SETTINGS as JSON. An empty line on stdout says that all sessions
have had replies. They continue until stdin ends; then stdout has the replies.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from contextlib import AsyncExitStack
from http import HTTPStatus
from pathlib import Path

import aiohttp
import msgspec
import numpy as np

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.data.model_dir import ModelInfo
from asyncrl.engine.client import SamplingParams
from asyncrl.engine.generator import Generator, Watch
from asyncrl.engine.request_options import RequestOptions
from asyncrl.telemetry.logs import open_log
from benchmarks.load import fleet_of
from benchmarks.talks import APIS, CONTEXT, LETTERS, SPECIAL, Reply, Talk
from topics.trajectories import Answer

_TURNS = 3  # turns of a session
_ASKED = 60  # characters of a message
_END = 2  # token after a reply


class Crowd(msgspec.Struct):
    """The clients of a process."""

    bus: str  # file with its address
    run: str
    engine_key: str  # file
    gateway: str  # its address
    key: str  # of the gateway
    tokens: int  # of a reply
    portion: int  # tokens of an event
    in_place: bool  # engines take new weights under requests
    vocabulary: int
    sessions: int  # number of concurrent sessions
    straight: bool = False  # directly to the engine
    first: int = 0  # number of the first session


class _Through:
    """A session through the gateway."""

    def __init__(self, crowd: Crowd, http: aiohttp.ClientSession, number: int) -> None:
        self._talk = Talk(http, crowd.gateway, crowd.key, APIS[number % len(APIS)])

    async def send(self, text: str, tokens: int) -> Reply:
        return (await self._talk.send(text, tokens=tokens))._replace(text="")


class _Straight(Watch):
    """A session directly with the engine: the same ids, by the model's template."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._ids: list[int] = []
        self._came: list[tuple[float, int]] = []

    async def send(self, text: str, tokens: int) -> Reply:
        self._ids += [LETTERS.index(letter) + SPECIAL for letter in text + ">"]
        self._came, asked = [], time.monotonic()
        sampling = SamplingParams(tokens)
        answer = Answer("generate", "", done=False)
        answer = await self._generator.generate(np.array(self._ids, np.int32), sampling, answer=answer, watch=self)
        self._ids += [*answer.tokens.tolist(), _END]
        return Reply(asked, time.monotonic() - asked, self._came, HTTPStatus.OK, broken=False)

    def on_tokens(self, tokens: int, discarded: int, lineage: int) -> None:
        """See `Watch`."""
        if tokens:
            self._came.append((time.monotonic(), tokens))


async def _hold(crowd: Crowd, replies: list[Reply]) -> None:
    """Hold sessions until cancelled."""
    async with AsyncExitStack() as stack:
        if crowd.straight:
            bus = await Bus.connect(BusAddress.read(Path(crowd.bus)), crowd.run)
            stack.push_async_callback(bus.close)
            fleet = await stack.enter_async_context(fleet_of(bus, Path(crowd.engine_key)))
            manner = RequestOptions(crowd.portion, in_place=crowd.in_place)
            generator = Generator(fleet, ModelInfo("any", crowd.vocabulary, CONTEXT), str, counts={}, manner=manner)
        else:
            http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))

        async def follow(number: int) -> None:
            draw = random.Random(f"session {number}")
            # the first reply has a random length, so that replies do not all end together
            tokens = draw.randint(1, crowd.tokens)
            while True:
                session = _Straight(generator) if crowd.straight else _Through(crowd, http, number)
                for _ in range(_TURNS):
                    replies.append(await session.send("".join(draw.choices(LETTERS[:-1], k=_ASKED)), tokens))
                    tokens = crowd.tokens
                    if len(replies) == crowd.sessions:
                        sys.stdout.buffer.write(b"\n")
                        sys.stdout.flush()

        async with asyncio.TaskGroup() as group:
            for number in range(crowd.first, crowd.first + crowd.sessions):
                group.create_task(follow(number))


async def _until_ended(crowd: Crowd) -> None:
    replies: list[Reply] = []
    holding = asyncio.create_task(_hold(crowd, replies))
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    await asyncio.wait([holding, ended], return_when=asyncio.FIRST_COMPLETED)
    if holding.done():
        holding.result()
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    sys.stdout.buffer.write(msgspec.msgpack.encode(replies))


if __name__ == "__main__":
    import uvloop

    open_log()  # log to stderr: stdout is for figures
    uvloop.run(_until_ended(msgspec.json.decode(sys.argv[1], type=Crowd)))
