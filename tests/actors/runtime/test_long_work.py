"""Work beyond `workers.stall_s`: what has a time limit of its own keeps its lease, what hangs loses it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from nats.aio.msg import Msg

import actors.reward.actor
import actors.rollout.actor
from actors.runtime.actor import Context
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.provision import queue_states
from asyncrl.bus.publish import publish, read
from harness.results import counts, generated, is_done
from harness.stage import LEASE_S, Stage, provision_leased, until
from topics.engines import EngineReady
from topics.prompts import PromptIssued, PromptRow
from topics.topic import GRADES, TRAJECTORIES
from topics.trajectories import TRAJECTORY_FAILED, TRAJECTORY_GENERATED, TRAJECTORY_GRADED, TrajectoryFailed

STALL = {"lease_s": 0.6, "stall_s": 0.1}  # renewed every 0.2 s; what counts as hung loses its lease after 0.7 s
UNHURRIED_S = 120.0  # a lease, or a limit, that no loaded machine exceeds
SLOW_REWARD = """
import time
from pathlib import Path

def reward(completion, trajectory_id):
    Path(__file__).with_name("calls").open("a").write(f"{trajectory_id}\\n")
    while not Path(__file__).with_name("go").exists():
        time.sleep(0.02)
    return 1.0
"""
ROLLOUTS = """
import asyncio
from pathlib import Path

def note(name):
    Path(__file__).with_name(name).open("a").write("call\\n")

async def slow():
    note("slow")
    while not Path(__file__).with_name("go").exists():
        await asyncio.sleep(0.02)

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


async def is_renewed(bus: Bus, pieces: int) -> None:
    """Wait until so many pieces of work were renewed for longer than what counts as hung keeps a lease."""
    times: dict[str, list[float]] = {}
    kept = asyncio.Event()

    async def note(message: Msg) -> None:
        if message.data == b"+WPI":
            times.setdefault(message.subject, []).append(time.monotonic())
        lasting = [seen for seen in times.values() if seen[-1] - seen[0] > STALL["stall_s"] + STALL["lease_s"]]
        if len(lasting) == pieces:
            kept.set()

    end = await bus.subscribe("$JS.ACK.>", note)
    await until(kept.is_set, "leases are renewed while nothing advances")
    await end()


async def test_a_reward_within_its_limit_and_what_queues_behind_it_keep_their_leases(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path
):
    await provision_leased(bus, UNHURRIED_S)
    (tmp_path / "reward.py").write_text(SLOW_REWARD)
    reward = {"function": f"{tmp_path / 'reward.py'}:reward", "time_limit_s": UNHURRIED_S, "children": 1}
    context = stage(reward=reward, workers=STALL).context("reward", bus)
    for number in range(3):
        await publish(bus, generated(number))

    async with playing(context, actors.reward.actor.main):
        await is_renewed(bus, 3)
        (tmp_path / "go").touch()
        await until(lambda: is_done(bus, "reward"), "all are graded")

    assert await counts(bus, GRADES) == {TRAJECTORY_GRADED.name: 3}
    assert sorted(calls(tmp_path)) == [f"p{number:06d}-0" for number in range(3)]
    assert not context.faults


@asynccontextmanager
async def rolling_out(
    bus: Bus,
    stage: Callable[..., Stage],
    tmp_path: Path,
    function: str,
    *,
    leases: tuple[float, dict[str, float]] = (UNHURRIED_S, STALL),
    tool_limit_s: float = UNHURRIED_S,
) -> AsyncIterator[None]:
    """A rollout worker inside the test, an engine for it, and one trajectory of this function.

    Args:
        leases: seconds of those that the server grants, and the settings by which the worker keeps them.
    """
    await provision_leased(bus, leases[0])
    (tmp_path / "rollouts.py").write_text(ROLLOUTS)
    task = {"rollout": f"{tmp_path / 'rollouts.py'}:{function}"}
    rollout = {"tool_limit_s": tool_limit_s}
    scene = stage(engine={"kind": "scripted"}, task=task, workers=leases[1], rollout=rollout)
    scene.make_model()
    await publish(bus, EngineReady("engine-1", "scripted:1", 0, 0, "made", 16))
    issued = PromptIssued(prompt_id="p000000", member=0, group_size=1, rows=[PromptRow("^ab=", "ba")])
    await publish(bus, issued)
    context = scene.context("rollout", bus)
    async with playing(context, actors.rollout.actor.main):
        yield


async def test_a_tool_within_its_limit_keeps_its_lease_and_is_called_once(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path
):
    async with rolling_out(bus, stage, tmp_path, "slow_tool"):
        await is_renewed(bus, 1)
        (tmp_path / "go").touch()
        await until(lambda: is_done(bus, "rollout"), "the trajectory is generated")

    assert calls(tmp_path, "slow") == ["call"]
    assert (await counts(bus, TRAJECTORIES))[TRAJECTORY_GENERATED.name] == 1
    assert (await queue_states(bus))["rollout"]["redelivered"] == 0


@pytest.mark.parametrize("function", ["slow_tool", "endless_tool"])
async def test_a_tool_beyond_its_limit_fails_once(bus: Bus, stage: Callable[..., Stage], tmp_path: Path, function: str):
    leases = (UNHURRIED_S, {"lease_s": UNHURRIED_S})
    async with rolling_out(bus, stage, tmp_path, function, leases=leases, tool_limit_s=0.3):
        await until(lambda: is_done(bus, "rollout"), "the trajectory is over")

    newest = await read_last(bus, TRAJECTORY_FAILED, "p000000-0")
    assert newest is not None
    failed = await read(bus, TrajectoryFailed, newest)
    assert failed.reason == "rollout"
    assert "no answer within 0.3 s" in failed.detail
    assert len(calls(tmp_path, "slow") + calls(tmp_path, "never")) == 1


async def test_a_rollout_that_hangs_without_a_limit_loses_its_lease(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path
):
    async with rolling_out(bus, stage, tmp_path, "hangs", leases=(LEASE_S, STALL)):
        await until(lambda: len(calls(tmp_path, "never")) >= 2, "it is delivered again")
