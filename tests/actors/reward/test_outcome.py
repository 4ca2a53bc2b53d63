"""Grades that the reward worker makes of outcomes that rollout functions gave: by one rule, with metrics of both."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from actors.reward.actor import main
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last, read_newest
from asyncrl.bus.publish import publish
from harness.results import generated
from harness.stage import Stage, until
from topics.topic import GRADES
from topics.trajectories import TRAJECTORY_GRADED, Outcome, TrajectoryFailed, TrajectoryGraded, VersionCount
from topics.wire import decode

REWARD = """
def reward(completion):
    print("called")
    return {"reward": 0.25, "both": 2.0, "graded": 1.0}
"""


@asynccontextmanager
async def reward_worker(bus: Bus, stage: Callable[..., Stage], function: str, **settings: Any) -> AsyncIterator[None]:
    context = stage(reward={"function": function} | settings.pop("reward", {}), **settings).context("reward", bus)
    running = asyncio.create_task(main(context))
    yield
    context.stop.set()
    await asyncio.wait_for(running, 300)


async def claim(bus: Bus, outcome: Outcome | None, **fields: Any) -> TrajectoryGraded | TrajectoryFailed:
    """Return what the reward worker publishes of a result."""
    message = msgspec.structs.replace(generated(1), outcome=outcome, **fields)
    await publish(bus, message)
    found = []

    async def came() -> bool:
        record = await read_newest(bus, GRADES, f"asyncrl.{bus.run}.trajectory.*.p000001-0")
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


async def test_an_over_long_trajectory_is_punished_and_what_filters_read_is_measured(
    bus: Bus, stage: Callable[..., Stage]
):
    overlong = {"penalty": 2.0, "longest_tokens": 100, "interval_tokens": 40}
    settings = {"reward": {"overlong": overlong}, "learner": {"filters": ["garbage"]}}
    async with reward_worker(bus, stage, "exact", **settings):
        graded = await claim(bus, None, versions=[VersionCount(0, 50), VersionCount(1, 30)], completion="ba\n")

    assert isinstance(graded, TrajectoryGraded)
    assert (graded.reward, graded.metrics) == (1.0 - 2.0 * 20 / 40, {"overlong": -1.0, "garbage": 0.0})
    assert (graded.unshaped, graded.score) == (1.0, 1.0)


HANGS = """
import time

def reward(completion):
    time.sleep(1000)
"""


async def test_a_reward_past_its_time_limit_counts_as_the_reward_that_the_settings_name(
    bus: Bus, stage: Callable[..., Stage], tmp_path
):
    (tmp_path / "hangs.py").write_text(HANGS)
    limits = {"time_limit_s": 0.5, "timeout_reward": -1.0}
    async with reward_worker(bus, stage, f"{tmp_path / 'hangs.py'}:reward", reward=limits):
        graded = await claim(bus, None)

    assert isinstance(graded, TrajectoryGraded)
    assert (graded.reward, graded.metrics) == (-1.0, {"reward_timeout": 1.0})


MANY = """
def reward(completion):
    return [{"reward": len(text), "together": len(completion)} for text in completion]
"""


async def test_trajectories_that_wait_are_graded_by_one_call(bus: Bus, stage: Callable[..., Stage], tmp_path):
    (tmp_path / "many.py").write_text(MANY)
    for number in range(3):
        name = f"p000001-{number}"
        await publish(
            bus,
            msgspec.structs.replace(
                generated(1), trajectory_id=name, member=number, group_size=3, completion="x" * number
            ),
        )
    found = {}

    async def came() -> bool:
        for number in range(3):
            record = await read_last(bus, TRAJECTORY_GRADED, f"p000001-{number}")
            if record is not None:
                found[number] = decode(TrajectoryGraded, record.data)
        return len(found) == 3

    reward = {"function": f"{tmp_path / 'many.py'}:reward", "batch": 3}
    async with reward_worker(bus, stage, "", reward=reward):
        await until(came, "three grades")

    assert [found[number].reward for number in range(3)] == [0, 1, 2]
    assert {graded.metrics["together"] for graded in found.values()} == {3}
