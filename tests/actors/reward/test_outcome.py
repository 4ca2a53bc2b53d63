"""What the reward worker makes of outcomes that rollout functions gave: a grade by one rule, with metrics of both."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from actors.reward.actor import main
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import publish
from harness.results import generated
from harness.stage import Stage, until
from topics.topic import GRADES
from topics.trajectories import Outcome, TrajectoryFailed, TrajectoryGraded
from topics.wire import decode

REWARD = """
def reward(completion):
    print("called")
    return {"reward": 0.25, "both": 2.0, "graded": 1.0}
"""


@asynccontextmanager
async def reward_worker(bus: Bus, stage: Callable[..., Stage], function: str) -> AsyncIterator[None]:
    context = stage(reward={"function": function}).context("reward", bus)
    running = asyncio.create_task(main(context))
    yield
    context.stop.set()
    await asyncio.wait_for(running, 60)


async def claim(bus: Bus, outcome: Outcome | None) -> TrajectoryGraded | TrajectoryFailed:
    """What the reward worker publishes of a result."""
    message = generated(1)
    message.outcome = outcome
    await publish(bus, message)
    found = []

    async def came() -> bool:
        record = await read_last(bus, GRADES, f"asyncrl.{bus.run}.trajectory.*.p000001-0")
        if record is not None:
            found.append(decode(TrajectoryFailed if ".failed." in record.subject else TrajectoryGraded, record.data))
        return bool(found)

    await until(came, "a grade or a failure")
    return found[0]


@pytest.mark.parametrize(
    ("function", "outcome", "reward", "metrics"),
    [
        ("reward.py:reward", Outcome(0.75, {"own": 1.0}), 0.75, {"own": 1.0}),  # final: the function is not called
        ("", Outcome(0.75), 0.75, {}),
        ("reward.py:reward", Outcome(None, {"own": 1.0, "both": 1.0}), 0.25, {"own": 1.0, "both": 2.0, "graded": 1.0}),
        ("reward.py:reward", None, 0.25, {"both": 2.0, "graded": 1.0}),
    ],
)
async def test_a_reward_that_was_given_is_final_and_the_function_grades_the_others(
    bus: Bus, stage: Callable[..., Stage], tmp_path, function, outcome, reward, metrics
):
    (tmp_path / "reward.py").write_text(REWARD)
    async with reward_worker(bus, stage, function and f"{tmp_path / 'reward.py'}:reward"):
        graded = await claim(bus, outcome)

    assert isinstance(graded, TrajectoryGraded)
    assert (graded.reward, graded.metrics) == (reward, metrics)


@pytest.mark.parametrize("outcome", [None, Outcome(None, {"own": 1.0})])
async def test_without_a_reward_from_anywhere_a_trajectory_fails(bus: Bus, stage: Callable[..., Stage], outcome):
    async with reward_worker(bus, stage, ""):
        failed = await claim(bus, outcome)

    assert isinstance(failed, TrajectoryFailed)
    assert failed.reason == "reward"
    assert "the rollout function gave no reward (context.outcome(reward))" in failed.detail
