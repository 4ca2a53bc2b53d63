"""The fence of a trajectory whose task has a pool of reward workers: its subjects name the pool."""

from typing import Any

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import Fenced, publish_if_latest
from harness.examples import unsealed
from topics.roles import WorkerPool
from topics.table import BUILT_IN
from topics.trajectories import TRAJECTORY_GENERATED, TrajectoryGenerated, TrajectoryProgressed


async def test_the_fence_of_a_task_of_a_pool_spans_progress_and_result(bus: Bus):
    bus.tables = BUILT_IN.with_pools([WorkerPool("reward", "code", ("sums",))])
    result: Any = unsealed(TrajectoryGenerated)
    result.trajectory_id, result.task = "p000001-0", "sums"
    first, second = (
        TrajectoryProgressed(trajectory_id="p000001-0", delivery=number, log=f"log-{number}") for number in (1, 2)
    )
    begun = await publish_if_latest(bus, first, 0, task="sums")
    taken_over = await publish_if_latest(bus, second, begun, task="sums")

    with pytest.raises(Fenced):
        await publish_if_latest(bus, result, begun)
    sequence = await publish_if_latest(bus, result, taken_over)

    newest = await read_last(bus, TRAJECTORY_GENERATED, "p000001-0")
    assert newest is not None
    assert (newest.sequence, newest.subject) == (sequence, f"asyncrl.{bus.run}.trajectory.generated.code.p000001-0")
