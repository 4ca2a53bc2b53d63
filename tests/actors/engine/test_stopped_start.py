"""An engine actor that is asked to stop while its server starts."""

import asyncio
from collections.abc import Callable

import pytest

from actors.engine.actor import EngineActor
from asyncrl.bus.connection import Bus
from asyncrl.engine.scripted.control import ScriptedControl
from harness.stage import Stage


async def test_an_engine_that_is_asked_to_stop_does_not_wait_for_its_server(
    bus: Bus, stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
):
    starting = asyncio.Event()

    class Slow(ScriptedControl):
        async def start(self) -> None:
            starting.set()
            await asyncio.Event().wait()

    monkeypatch.setattr("actors.engine.actor.open_control", Slow)
    context = stage(engine={"kind": "scripted"}).context("engine", bus)
    context.actor_id = "engine-1"
    running = asyncio.create_task(EngineActor(context).run())
    await asyncio.wait_for(starting.wait(), 60)
    context.leave()

    await asyncio.wait_for(running, 60)
