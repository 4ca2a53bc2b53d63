"""A run whose tasks have separate pools of workers: each leases its tasks alone, over a kill and over its scaling."""

from pathlib import Path

import pytest

from asyncrl.bus.log import read_last_of_each
from harness.audited import audited_clean, messages_on
from harness.configs import TWO_TASKS
from harness.gated import closed_gate
from harness.runs import command, topics_left_in, up
from topics.prompts import PROMPT_ISSUED
from topics.roles import pool_of
from topics.topic import GRADES, PROMPTS, TRAJECTORIES
from topics.trajectories import TRAJECTORY_GENERATED, TRAJECTORY_GRADED, TRAJECTORY_PROGRESSED

pytestmark = pytest.mark.slow

CONFIG = (
    TWO_TASKS
    + """
tasks.sums.rollout = "gated.py:rollout"
[rollout]
group_size = 4
max_new_tokens = 7
progress_tokens = 3
[rollout.pools.code]
tasks = ["sums"]
slots = 8
[reward.pools.code]
time_limit_s = 20.0
[buffer]
batch_groups = 6
[learner]
steps = 4
[eval]
prompts = 4
[workers]
lease_s = 2.0
[nats]
keep = "run"
"""
)


async def test_pools_alone_run_and_grade_their_tasks_over_kills_and_over_their_scaling(tmp_path: Path):
    gate = closed_gate(tmp_path, 1)
    async with up(tmp_path, config=CONFIG) as run:
        await run.reaches(lambda: 1 in run.steps(), "its first step")
        await run.kill("rollout-code-1")
        await run.kill("reward-code-1")
        code, said = await command(tmp_path, "scale", "short", "rollout.code=2", "reward.code=2")
        assert code == 0, said
        assert "scaled: rollout-code 2, reward-code 2" in said
        gate.unlink()
        assert await run.ended() == 0, run.story

    await audited_clean(tmp_path)
    async with topics_left_in(run.root) as bus:
        issued = {one.trajectory_id: one for one in (await messages_on(bus, PROMPTS)).on(PROMPT_ISSUED)}
        generated = await read_last_of_each(bus, TRAJECTORIES, [TRAJECTORY_GENERATED.pattern(bus.run)])
        begun = await read_last_of_each(bus, TRAJECTORIES, [TRAJECTORY_PROGRESSED.pattern(bus.run)])
        graded = await read_last_of_each(bus, GRADES, [TRAJECTORY_GRADED.pattern(bus.run)])
    assert {"words", "sums"} == {one.task for one in issued.values()}
    assert {(issued[record.key].task, record.subject.count(".code.")) for record in begun} >= {("sums", 1)}
    for role, records in (("rollout", generated), ("reward", graded)):
        pools = {(issued[record.key].task, pool_of(record.headers["by"])) for record in records}
        assert pools == {("words", role), ("sums", f"{role}-code")}
