"""A run that exists on its topics alone, for tests of the page."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncrl.bus.acks import MESSAGE_ID
from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.provision import equal_sizes, provision
from asyncrl.bus.publish import WRITER, pack, publish
from asyncrl.bus.server import EmbeddedServer
from asyncrl.run.connect import FoundRun
from asyncrl.state.status import run_moment, run_status
from harness.states import MadeState
from topics.actors import VITALS_TAKEN, Vitals
from topics.batches import BATCH_TRAINED, BatchTrained
from topics.prompts import PromptRow
from topics.runs import RUN_HISTORY, RUN_STATE, RunStatus
from topics.topic import Topic
from topics.trajectories import (
    TRAJECTORY_GRADED,
    Reference,
    Segment,
    TrajectoryGenerated,
    TrajectoryGraded,
    VersionCount,
    count_versions,
)
from topics.wire import Message

RUN = "mine"


class FedRun:
    """The topics of a run, whose messages a test publishes."""

    def __init__(self, root: Path, server: EmbeddedServer, owner: Bus) -> None:
        self.server, self.owner, self.root = server, owner, root
        self._count = 0
        self._queued: list[asyncio.Future[int]] = []

    def found(self, role: str) -> FoundRun:
        """The run as a program on another machine finds it."""
        return FoundRun(RUN, None, self.login(role))

    def login(self, role: str) -> BusAddress:
        return BusAddress.read(self.root / "credentials" / f"{role}.json")

    async def store(self, topic: Topic[Any], message: Message, key: str = "") -> int:
        return await self.store_raw(topic, pack(message, topic), key)

    async def store_raw(self, topic: Topic[Any], body: bytes, key: str = "") -> int:
        self._count += 1
        headers = {MESSAGE_ID: f"{topic.name}-{self._count}", WRITER: "test"}
        return (await self.owner.store(topic.subject(RUN, key), body, headers)).seq

    async def state(self, **changes: Any) -> RunStatus:
        """Publish a state."""
        state = MadeState().state
        state.run = RUN
        status = msgspec.structs.replace(run_status(state, state.now_ns), **changes)
        await self.store(RUN_STATE, status)
        return status

    async def moments(self, count: int) -> None:
        """Publish a course of states, one each second."""
        state = MadeState().state
        status = run_status(state, state.now_ns)
        for number in range(count):
            moment = run_moment(msgspec.structs.replace(status, at_s=1000.0 + number, step=number), "1s")
            moment.metrics = {"reward/mean": number / count, "throughput/tokens_per_s": 500.0 + number}
            await self.store(RUN_HISTORY, moment, "1s")

    async def train(self, steps: range) -> None:
        """Publish steps."""
        metrics = {"train_s": 0.5, "wait_s": 0.1, "entropy": 2.0, "grad_norm": 0.3}
        for step in steps:
            figures = metrics | {"loss": 1.0 / (1 + step)}
            trained = BatchTrained(step, 0, "rl", figures, {0: 60, 1: 40}, 0, [step / steps.stop, 0.1], 8, max(1, step))
            await self.enqueue(BATCH_TRAINED, pack(trained, BATCH_TRAINED))
        await self.enqueued()

    async def vitals(self, numbers: range, at_s: float) -> None:
        """Publish vital signs of rollout actors."""
        for number in numbers:
            values = {"cpu_share": 0.5, "slots": 8.0, "tokens": 1000.0 + at_s}
            vitals = Vitals("rollout", f"rollout-{number}", 7, at_s, values)
            await self.enqueue(VITALS_TAKEN, pack(vitals, VITALS_TAKEN), f"rollout-{number}")
        await self.enqueued()

    async def grades(self, numbers: range) -> None:
        """Publish grades of trajectories whose tokens are stored nowhere."""
        for number in numbers:
            name = f"p{number:06d}-0"
            work: dict[str, Any] = {"trajectory_id": name, "prompt_id": name[:-2], "member": 0, "group_size": 4}
            versions, payload = [VersionCount(3, 8)], Reference(1 + number, "0", 1)
            graded = TrajectoryGraded(**work, stage="rl", versions=versions, payload=payload, reward=number % 2)
            await self.enqueue(TRAJECTORY_GRADED, pack(graded, TRAJECTORY_GRADED), name)
        await self.enqueued()

    async def enqueue(self, topic: Topic[Any], body: bytes, key: str = "") -> None:
        """Publish without waiting for the acknowledgement, except that of one in many."""
        self._queued.append(asyncio.ensure_future(self.store_raw(topic, body, key)))
        if len(self._queued) >= 500:
            await self.enqueued()

    async def enqueued(self) -> None:
        """Wait until all messages are stored."""
        queued, self._queued = self._queued, []
        await asyncio.gather(*queued)

    async def trajectory(self, name: str, tokens: int = 8, *, reward: float = 1.0, **texts: str) -> int:
        """Publish a trajectory with its grade; returns the sequence of its tokens."""
        ids = np.arange(tokens, dtype=np.int32) % 32
        mask = (np.arange(tokens) >= tokens // 4).astype(np.uint8)
        logprobs = np.where(mask, -np.linspace(0, 4, tokens), 0).astype(np.float32)
        versions = np.where(mask, np.arange(tokens) // max(1, tokens // 3), -1).astype(np.int32)
        segments = [Segment(ids, mask, logprobs, versions)]
        work: dict[str, Any] = {"trajectory_id": name, "prompt_id": name.split("-")[0], "member": 0, "group_size": 4}
        work |= {"stage": "rl", "versions": count_versions(segments)}
        rows = [PromptRow(texts.get("prompt", "^abcdefgh="))]
        completion = texts.get("completion", "hgfedcba")
        generated = TrajectoryGenerated(**work, rows=rows, segments=segments, completion=completion)
        sequence = await publish(self.owner, generated)
        await publish(self.owner, TrajectoryGraded(**work, payload=Reference(sequence, "0", 1), reward=reward))
        return sequence

    async def provision_again(self) -> None:
        """Make the streams again that lived in the memory of the server."""
        await provision(self.owner, equal_sizes(payload_mb=64, ledger_mb=64), lease_s=5)


@contextlib.asynccontextmanager
async def fed_run(root: Path) -> AsyncIterator[FedRun]:
    """A server with the empty topics of a run."""
    server = EmbeddedServer(root, run=RUN)
    owner = await Bus.connect(await server.start(), RUN)
    try:
        await provision(owner, equal_sizes(payload_mb=64, ledger_mb=64), lease_s=5)
        yield FedRun(root, server, owner)
    finally:
        await owner.close()
        await server.stop()
