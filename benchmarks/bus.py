"""The cost of typed messages over bare NATS, durable publishes per second, and the codec alone."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import nats
import numpy as np
from nats.aio.client import Client
from nats.aio.msg import Msg

from asyncrl.bus.acks import MESSAGE_ID
from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.provision import equal_sizes, provision
from asyncrl.bus.publish import publish
from asyncrl.bus.server import EmbeddedServer
from topics.prompts import PROMPT_ISSUED, PromptIssued, PromptRow
from topics.trajectories import Segment, TrajectoryGenerated, VersionCount
from topics.wire import Message, decode, encode

TOKENS = 4096
_RUN = "bench-bus"
_AT_ONCE = 512

M = TypeVar("M", bound=Message)


class Sizes(NamedTuple):
    """Messages of one round of each measurement."""

    prompts: int = 20_000
    trajectories: int = 4_000
    small: int = 20_000
    large: int = 2_000
    codec: int = 2_000


def prompt() -> PromptIssued:
    """A prompt as the demo issues it."""
    row = PromptRow("^abcdefgh=", label="hgfedcba", metadata={"letters": 8})
    return PromptIssued(prompt_id="p000042", member=3, group_size=8, rows=[row], min_version=7, seed=1 << 60)


def trajectory() -> TrajectoryGenerated:
    """A trajectory of 4k tokens, about 53 kB."""
    draw = np.random.default_rng(0)
    segment = Segment(
        tokens=draw.integers(0, 150_000, TOKENS, dtype=np.int32),
        mask=np.ones(TOKENS, np.uint8),
        logprobs=-draw.random(TOKENS, dtype=np.float32),
        versions=np.full(TOKENS, 7, np.int32),
    )
    return TrajectoryGenerated(
        trajectory_id="p000042-3",
        prompt_id="p000042",
        member=3,
        group_size=8,
        stage="rl",
        rows=[PromptRow("^abcdefgh=", label="hgfedcba")],
        segments=[segment],
        completion="hgfedcba",
        versions=[VersionCount(7, TOKENS)],
    )


async def bench_bus(*, rounds: int = 5, sizes: Sizes | None = None) -> dict[str, float]:
    """Measure with a separate server; each figure is the median of interleaved rounds."""
    sizes = sizes or Sizes()
    taken: dict[str, list[float]] = {}

    def note(name: str, value: float) -> float:
        taken.setdefault(name, []).append(value)
        return value

    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedServer(Path(directory))
        address = await server.start()
        try:
            bus = await Bus.connect(address, _RUN, name="bench")
            await provision(bus, equal_sizes(payload_mb=4096, ledger_mb=4096), lease_s=10)
            for _ in range(rounds):
                for name, message, count in (
                    ("prompt", prompt(), sizes.prompts),
                    ("trajectory", trajectory(), sizes.trajectories),
                ):
                    typed = note(f"typed_{name}_per_s", await _typed_rate(bus, message, count))
                    bare = note(f"bare_{name}_per_s", await _bare_rate(address, encode(message), count))
                    note(f"typed_{name}_share_of_bare", typed / bare)
                note("stored_1_kib_per_s", await _store_rate(bus, sizes.small))
                note("stored_trajectories_per_s", await _publish_rate(bus, sizes.large))
                codec_us(note, sizes.codec)
            await bus.close()
        finally:
            await server.stop()
    return {name: statistics.median(values) for name, values in taken.items()}


def codec_us(note: Callable[[str, float], float], count: int) -> None:
    """Microseconds to encode and to decode a trajectory of 4k tokens, without its headers."""
    message = trajectory()
    began = time.perf_counter()
    for _ in range(count):
        body = encode(message)
    note("encode_trajectory_us", 1e6 * (time.perf_counter() - began) / count)
    began = time.perf_counter()
    for _ in range(count):
        decode(TrajectoryGenerated, body)
    note("decode_trajectory_us", 1e6 * (time.perf_counter() - began) / count)


async def _typed_rate(bus: Bus, message: Message, count: int) -> float:
    """Messages per second, encoded, sent, received and decoded, by one process."""
    kind = type(message)
    all_here, arrived = asyncio.Event(), 0

    async def receive(raw: Msg) -> None:
        nonlocal arrived
        decode(kind, raw.data)
        arrived += 1
        if arrived == count:
            all_here.set()

    end = await bus.subscribe("bench.typed", receive)
    began = time.perf_counter()
    for _ in range(count):
        await bus.send("bench.typed", encode(message))
    await all_here.wait()
    rate = count / (time.perf_counter() - began)
    await end()
    return rate


async def _bare_rate(address: BusAddress, body: bytes, count: int) -> float:
    """Messages per second with nats-py alone and bytes that are already encoded."""
    client: Client = await nats.connect(
        address.url, user=address.user, password=address.password, pending_size=64 * 1024 * 1024
    )
    all_here, arrived = asyncio.Event(), 0

    async def receive(_raw: Msg) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == count:
            all_here.set()

    await client.subscribe("bench.bare", cb=receive, pending_msgs_limit=0, pending_bytes_limit=0)
    began = time.perf_counter()
    for _ in range(count):
        await client.publish("bench.bare", body)
    await all_here.wait()
    rate = count / (time.perf_counter() - began)
    await client.close()
    return rate


async def _store_rate(bus: Bus, count: int) -> float:
    """Acknowledged publishes per second of 1 KiB; each message has a different id."""
    body, mark = bytes(1024), time.time_ns()
    subject = PROMPT_ISSUED.subject(bus.run, "p000042-3")

    async def store(number: int) -> None:
        await bus.store(subject, body, {MESSAGE_ID: f"{mark}:{number}"})

    return await _rate(store, count)


async def _publish_rate(bus: Bus, count: int) -> float:
    """Trajectories of 4k tokens that are packed, described in headers and stored, per second."""
    message, mark = trajectory(), time.time_ns()

    async def store(number: int) -> None:
        name = f"p{number:06d}"
        await publish(bus, msgspec.structs.replace(message, trajectory_id=f"{name}-0", prompt_id=name, delivery=mark))

    return await _rate(store, count)


async def _rate(one: Callable[[int], Awaitable[None]], count: int) -> float:
    """Calls per second of `one`, with as many concurrent calls as a connection takes."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await one(number)

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
    return count / (time.perf_counter() - began)
