"""Work beyond `workers.stall_s`: what has a time limit of its own keeps its lease, what hangs loses it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import actors.reward.actor
import actors.rollout.actor
from actors.runtime.actor import Context
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.provision import queue_states
from asyncrl.bus.publish import publish, read
from harness.results import counts, generated, is_done
from harness.stage import Stage, until
from topics.engines import EngineReady
from topics.prompts import PromptIssued, PromptRow
from topics.topic import GRADES, TRAJECTORIES
from topics.trajectories import TRAJECTORY_FAILED, TRAJECTORY_GENERATED, TRAJECTORY_GRADED, TrajectoryFailed

STALL = {"lease_s": 0.5, "stall_s": 0.8}  # a lease that is not renewed is lost after 1.3 s
SLOW_REWARD = """
import time
from pathlib import Path

def reward(completion, trajectory_id):
    Path(__file__).with_name("calls").open("a").write(f"{trajectory_id}\\n")
    time.sleep(2)
    return 1.0
"""
ROLLOUTS = """
import asyncio
from pathlib import Path

def note(name):
    Path(__file__).with_name(name).open("a").write("call\\n")

async def slow():
    note("slow")
    await asyncio.sleep(2.5)

async def never():
    note("never")
    await asyncio.Event().wait()

async def answer(context):
    await context.generate([1, 2])

async def slow_tool(row, context):
    await answer(context)
    await context.tool("slow", slow)

async def endless_tool(row, context):
    await answer(context)
    await context.tool("endless", never, time_limit_s=0.3)

async def hangs(row, context):
    await answer(context)
    await never()
"""


@asynccontextmanager
async def playing(context: Context, main: Callable[[Context], object]) -> AsyncIterator[None]:
    """An actor that runs inside the test."""
    running = asyncio.ensure_future(main(context))
    try:
        yield
    finally:
        context.stop.set()
        await asyncio.wait_for(running, 120)


def calls(tmp_path: Path, name: str = "calls") -> list[str]:
    file = tmp_path / name
    return file.read_text().split() if file.exists() else []


async def test_a_reward_within_its_limit_and_what_queues_behind_it_keep_their_leases(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path
):
    (tmp_path / "reward.py").write_text(SLOW_REWARD)
    reward = {"function": f"{tmp_path / 'reward.py'}:reward", "time_limit_s": 20.0, "children": 1}
    context = stage(reward=reward, workers=STALL).context("reward", bus)
    for number in range(3):
        await publish(bus, generated(number))

    async with playing(context, actors.reward.actor.main):
        await until(lambda: is_done(bus, "reward"), "all are graded")

    assert await counts(bus, GRADES) == {TRAJECTORY_GRADED.name: 3}
    assert sorted(calls(tmp_path)) == [f"p{number:06d}-0" for number in range(3)]
    assert not context.faults


@asynccontextmanager
async def rolling_out(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path, function: str, **rollout: float
) -> AsyncIterator[Context]:
    """A rollout worker inside the test, an engine for it, and one trajectory of this function."""
    (tmp_path / "rollouts.py").write_text(ROLLOUTS)
    task = {"rollout": f"{tmp_path / 'rollouts.py'}:{function}"}
    scene = stage(engine={"kind": "scripted"}, task=task, workers=STALL, rollout=rollout)
    scene.make_model()
    await publish(bus, EngineReady("engine-1", "scripted:1", 0, 0, "made", 16))
    issued = PromptIssued(prompt_id="p000000", member=0, group_size=1, rows=[PromptRow("^ab=", "ba")])
    await publish(bus, issued)
    context = scene.context("rollout", bus)
    async with playing(context, actors.rollout.actor.main):
        yield context


async def test_a_tool_within_its_limit_keeps_its_lease_and_is_called_once(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path
):
    async with rolling_out(bus, stage, tmp_path, "slow_tool", tool_limit_s=20.0):
        await until(lambda: is_done(bus, "rollout"), "the trajectory is generated")

    assert calls(tmp_path, "slow") == ["call"]
    assert (await counts(bus, TRAJECTORIES))[TRAJECTORY_GENERATED.name] == 1
    assert (await queue_states(bus))["rollout"]["redelivered"] == 0


@pytest.mark.parametrize("function", ["slow_tool", "endless_tool"])
async def test_a_tool_beyond_its_limit_fails_once(bus: Bus, stage: Callable[..., Stage], tmp_path: Path, function: str):
    async with rolling_out(bus, stage, tmp_path, function, tool_limit_s=0.3):
        await until(lambda: is_done(bus, "rollout"), "the trajectory is over")

    newest = await read_last(bus, GRADES, TRAJECTORY_FAILED.subject(bus.run, "p000000-0"))
    assert newest is not None
    failed = await read(bus, TrajectoryFailed, newest)
    assert failed.reason == "rollout"
    assert "no answer within 0.3 s" in failed.detail
    assert len(calls(tmp_path, "slow") + calls(tmp_path, "never")) == 1


async def test_a_rollout_that_hangs_without_a_limit_loses_its_lease(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path
):
    async with rolling_out(bus, stage, tmp_path, "hangs"):
        await until(lambda: len(calls(tmp_path, "never")) == 2, "it is delivered again")
