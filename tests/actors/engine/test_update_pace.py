"""The least time between two updates of an engine."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from actors.engine.actor import EngineActor
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record
from asyncrl.bus.publish import WRITER, publish
from harness.stage import Stage, until
from harness.versions import empty_version
from topics.engines import ENGINE_READY, EngineReady
from topics.topic import ENGINES
from topics.wire import decode


async def test_of_the_versions_that_come_within_the_least_interval_an_engine_loads_the_newest(
    bus: Bus, stage: Callable[..., Stage]
):
    tables: dict[str, Any] = {"engine": {"kind": "scripted"}, "weights": {"min_interval_s": 3.0}}
    context = stage(**tables).context("engine", bus)
    context.actor_id = "engine-1"
    versions: list[int] = []

    def on_record(record: Record) -> None:
        versions.append(decode(EngineReady, record.data).version)

    reader = LogReader(bus, ENGINES, on_record, subjects=[ENGINE_READY.pattern(bus.run)])
    await reader.start()
    await publish(bus, empty_version(context.files, 0), headers={WRITER: "a learner"})
    running = asyncio.create_task(EngineActor(context).run())
    try:
        await until(lambda: versions == [0] or running.done(), "it is ready")
        began = time.monotonic()
        for version in range(1, 5):
            await publish(bus, empty_version(context.files, version), headers={WRITER: "a learner"})

        await until(lambda: len(versions) > 1 or running.done(), "it has another version")

        assert versions == [0, 4]
        assert time.monotonic() - began > 2.0
    finally:
        context.stop.set()
        await asyncio.gather(running, return_exceptions=True)
        await reader.close()
