"""A rollout worker that plays inside a test, and everything it publishes."""

import asyncio

from actors.rollout.actor import RolloutWorker
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.publish import publish
from harness.stage import Stage
from topics.engines import EngineGone, EngineReady, EngineUpdating
from topics.prompts import PromptIssued, PromptRow
from topics.table import BUILT_IN
from topics.topic import GRADES, TRAJECTORIES
from topics.trajectories import TRAJECTORY_FAILED, TRAJECTORY_GENERATED, TrajectoryFailed, TrajectoryGenerated
from topics.wire import decode

KEY = "0:0:made"
SLOTS = 32


class Worker:
    """A rollout worker on a stage, the engine actors that it follows, and its results."""

    def __init__(self, bus: Bus, stage: Stage) -> None:
        self.bus = bus
        self.context = stage.context("rollout", bus)
        self.worker = RolloutWorker(self.context)
        self.results: dict[str, TrajectoryGenerated] = {}
        self.failures: dict[str, TrajectoryFailed] = {}
        self._readers = [LogReader(bus, stream, self._on_record) for stream in (TRAJECTORIES, GRADES)]

    async def start(self) -> None:
        for reader in self._readers:
            await reader.start()
        self._running = asyncio.create_task(self.worker.run())

    async def stop(self) -> None:
        self.context.stop.set()
        await asyncio.wait_for(self._running, 120)
        for reader in self._readers:
            await reader.close()

    async def ready(self, address: str, key: str = KEY, engine: str = "engine-1") -> None:
        lineage, version, digest = key.split(":")
        message = EngineReady(engine, address, int(lineage), int(version), digest, SLOTS)
        await publish(self.bus, message)

    async def updating(self, engine: str = "engine-1") -> None:
        await publish(self.bus, EngineUpdating(engine, 0, 1))

    async def gone(self, engine: str = "engine-1") -> None:
        await publish(self.bus, EngineGone(engine, "stopped"))

    async def issue(self, *names: str, prompt: str = "^abc=") -> None:
        for name in names:
            prompt_id, member = name.rsplit("-", 1)
            row = PromptRow(prompt, "cba")
            message = PromptIssued(prompt_id=prompt_id, member=int(member), group_size=1, rows=[row])
            await publish(self.bus, message)

    def _on_record(self, record: Record) -> None:
        topic = BUILT_IN.topic_of(record.subject)
        if topic is TRAJECTORY_GENERATED:
            result = decode(TrajectoryGenerated, record.data)
            self.results[result.trajectory_id] = result
        elif topic is TRAJECTORY_FAILED:
            failure = decode(TrajectoryFailed, record.data)
            self.failures[failure.trajectory_id] = failure
