"""Twenty nodes of a Ray cluster killed under a run, one after the other; each is replaced by a new one.

It takes minutes, so it runs where it is asked for: ASYNCRL_RAY_CAMPAIGN=20 pytest -s tests/run/test_ray_campaign.py
"""

import asyncio
import os
import time
from pathlib import Path

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last_of_each
from benchmarks.ray_nodes import ray_nodes
from harness.audited import audited_clean
from harness.runs import Run, address_of, command, two_steps_more, up
from harness.stage import until
from topics.engines import ENGINE_READY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("ASYNCRL_RAY_CAMPAIGN" not in os.environ, reason="minutes: ASYNCRL_RAY_CAMPAIGN=20"),
]
KILLS = int(os.environ.get("ASYNCRL_RAY_CAMPAIGN", "20"))
LIMIT_S = 3000.0


async def engines_ready(run: Run) -> int:
    """Return how many of three engines were ready at least once."""
    bus = await Bus.connect(address_of(run), "short", name="campaign")
    try:
        subjects = [ENGINE_READY.subject("short", f"engine-{number}") for number in range(1, 4)]
        return len(await read_last_of_each(bus, ENGINE_READY.stream, subjects))
    finally:
        await bus.close()


async def all_ready(run: Run) -> bool:
    return await engines_ready(run) == 3


async def test_nothing_is_lost_or_trained_twice_when_nodes_are_killed(tmp_path: Path):
    with ray_nodes(2, 2, 2) as nodes:
        ray = ['placement.kind="ray"', f'placement.address="{nodes.address}"', f'placement.folder="{tmp_path}/hosts"']
        async with up(tmp_path, *ray, 'weights.store="stream"', "learner.steps=20000") as run:
            await two_steps_more(run, "it trains")
            words = ("--targets", "node", "--kills", str(KILLS), "--every", "4", "--seconds", str(LIMIT_S))
            killing = asyncio.create_task(command(tmp_path, "chaos", "--run", "short", *words, limit_s=LIMIT_S))
            while not killing.done():
                if len(nodes.swept()) < 3:
                    nodes.add(2)
                await asyncio.wait({killing}, timeout=0.5)
            code, said = killing.result()
            print(said)
            assert code == 0, said
            assert f"{KILLS} injections: node:kill {KILLS}" in said
            await two_steps_more(run, "it trains after the last kill")

            while len(nodes.swept()) < 3:
                nodes.add(2)
            code, said = await command(tmp_path, "scale", "short", "rollout=3")
            assert code == 0, said
            code, said = await command(tmp_path, "scale", "short", "engine=3")
            assert code == 1  # seven bundles on six CPUs
            assert "waits for a node of the Ray cluster with room for its bundle {CPU: 1}" in said
            assert await engines_ready(run) == 2
            began = time.monotonic()
            nodes.add(2)
            await until(lambda: all_ready(run), "the engine that waited is ready")
            print(f"{time.monotonic() - began:.1f} s from the start of a node until its engine was ready")
            code, said = await command(tmp_path, "down", "short")
            assert code == 0, said
            assert await run.ended() == 0, run.story
        await audited_clean(tmp_path)
