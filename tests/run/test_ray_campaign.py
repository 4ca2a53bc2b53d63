"""Twenty nodes of a Ray cluster killed under a run, one after the other; each is replaced by a new one.

It takes minutes, so it runs where it is asked for: ASYNCRL_RAY_CAMPAIGN=20 pytest -s tests/run/test_ray_campaign.py
"""

import asyncio
import os
import time
from pathlib import Path

import pytest

from harness.audited import audited_clean
from harness.ray_nodes import ray_nodes
from harness.runs import command, two_steps_more, up

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("ASYNCRL_RAY_CAMPAIGN" not in os.environ, reason="minutes: ASYNCRL_RAY_CAMPAIGN=20"),
]
KILLS = int(os.environ.get("ASYNCRL_RAY_CAMPAIGN", "20"))
LIMIT_S = 3000.0


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

            code, said = await command(tmp_path, "scale", "short", "engine=4", "rollout=3")
            assert code == 0, said
            began = time.monotonic()
            nodes.add(4)
            await run.reaches(lambda: nodes.found("actors.main engine engine-4"), "an engine starts on what joined")
            print(f"{time.monotonic() - began:.1f} s from the start of a node to that of an engine there")
            code, said = await command(tmp_path, "down", "short")
            assert code == 0, said
            assert await run.ended() == 0, run.story
        await audited_clean(tmp_path)
