"""A fault of the place where a rollout function works: the function runs again, and the trajectory gets no reward."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from actors.rollout.actor import RolloutWorker
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader
from asyncrl.bus.publish import publish
from harness.stage import Stage, until
from topics.prompts import PromptIssued, PromptRow
from topics.topic import GRADES
from topics.trajectories import TrajectoryFailed
from topics.wire import decode

HERE = Path(__file__).parents[2] / "harness"


async def test_a_function_runs_three_times_in_an_environment_that_fails(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path
):
    made = stage(task={"rollout": f"{HERE / 'rollouts.py'}:without_place"}, rollout={"group_size": 1})
    made.make_model()
    context, failures = made.context("rollout", bus), []
    reader = LogReader(bus, GRADES, lambda record: failures.append(decode(TrajectoryFailed, record.data)))
    await reader.start()
    working = asyncio.create_task(RolloutWorker(context).run())
    runs = tmp_path / "runs"
    row = PromptRow("^ab=", "ba", {"runs": str(runs)})
    await publish(bus, PromptIssued(prompt_id="p000001", member=0, group_size=1, rows=[row]))

    await until(lambda: bool(failures), "the trajectory fails")

    context.stop.set()
    await asyncio.wait_for(working, 120)
    await reader.close()
    assert (failures[0].reason, failures[0].detail) == ("environment", "3 times, the last one: no place in run 3")
    assert not context.faults
