"""A whole run whose reward compares the members of each group, whose worker is killed: every record adds up."""

from pathlib import Path

import pytest

from harness.audited import messages_on
from harness.gated import closed_gate
from harness.recorded import Recorded
from harness.runs import GATED, command, topics_left_in, up
from topics.batches import BATCH_PACKED
from topics.evals import EVAL_SCORED
from topics.groups import GROUP_COMPLETED, GROUP_GRADED
from topics.topic import BATCHES, GRADES

pytestmark = pytest.mark.slow

JUDGE = """
async def judge(first, second, prompt, label):
    return 0.5 if first == second else float(first < second)
"""
FAST = ["engine.kind=scripted", "learner.trainer=scripted", "warmup.steps=0"]
EVALUATED = ["eval.prompts=3", "eval.samples=2", "eval.temperature=1"]
RANKED = """
def reward(completion, label, trajectory_id):
    assert len(set(label)) == 1, "one row"
    order = sorted(trajectory_id)
    return [{"reward": order.index(name) / len(order), "members": len(completion)} for name in trajectory_id]
"""


async def test_groups_are_graded_by_one_call_each_and_all_adds_up(tmp_path: Path):
    (tmp_path / "ranked.py").write_text(RANKED)
    own = [f"reward.function={tmp_path / 'ranked.py'}:reward", "reward.scope=group", "learner.steps=4"]
    gate = closed_gate(tmp_path, 1)
    async with up(tmp_path, *own, *FAST, *EVALUATED, GATED) as run:
        await run.reaches(lambda: 1 in run.steps(), "its first step")
        await run.kill("groupreward-1")
        gate.unlink()
        assert await run.ended() == 0, run.story
        name = run.root.name

    code, output = await command(tmp_path, "audit", name, "--deep")
    assert (code, ": clean\n" in output) == (0, True), output
    async with topics_left_in(run.root) as bus:
        recorded = await Recorded.read(bus, Path((run.root / "base").read_text()))
        said, grades = await messages_on(bus, BATCHES), await messages_on(bus, GRADES)
    completed = {one.group_id: one for one in said.on(GROUP_COMPLETED)}
    scores = {one.group_id: one for one in grades.on(GROUP_GRADED)}
    assert len(completed) == len(said.on(GROUP_COMPLETED))
    assert len(scores) == len(grades.on(GROUP_GRADED))
    trained = [group for packed in said.on(BATCH_PACKED) if packed.stage == "rl" for group in packed.groups]
    assert len(trained) == 4 * 8
    for group in trained:
        names = [member.trajectory_id for member in completed[group.prompt_id].members]
        given = dict(zip(names, scores[group.prompt_id].grades, strict=True))
        for member in group.members:
            assert member.reward == given[member.trajectory_id].reward
            assert given[member.trajectory_id].metrics["members"] == 4
    evaluated = [one for one in said.on(EVAL_SCORED) if not one.failed]
    assert evaluated
    for one in evaluated:
        assert {f"{one.eval_id}-{first}" for first in (0, 2, 4)} <= completed.keys()
    assert run.summary["failed_trajectories_by_reason"] == {}
    assert recorded.findings().violations == []
    others = recorded.copy()
    others.alter(GROUP_GRADED, 0, lambda scores: scores.grades.reverse())
    assert others.kinds() == {"second grade"}
    again = recorded.copy()
    first = again.messages(GROUP_COMPLETED)[0]
    again.add(GROUP_COMPLETED, first, at=again.places(GROUP_COMPLETED)[0])
    assert "completed twice" in again.kinds()


async def test_a_tournament_goes_on_over_kills_of_its_workers(tmp_path: Path):
    """Two workers rank the groups, and both are killed in turn: nothing is lost, and nothing counts twice."""
    (tmp_path / "judge.py").write_text(JUDGE)
    own = [f"reward.function={tmp_path / 'judge.py'}:judge", "reward.scope=group", "reward.tournament=anchor"]
    own += ["reward.workers=2", "learner.steps=9", "workers.lease_s=1.0"]
    gate = closed_gate(tmp_path, 4)
    async with up(tmp_path, *own, *FAST, GATED, "eval.prompts=0", "learner.scripted_step_s=0.2") as run:
        for kills in range(1, 5):
            await run.reaches(lambda kills=kills: kills in run.steps(), f"step {kills}")
            await run.kill(f"groupreward-{1 + kills % 2}")
        gate.unlink()
        assert await run.ended() == 0, run.story
        name = run.root.name

    code, output = await command(tmp_path, "audit", name, "--deep")
    assert (code, ": clean\n" in output) == (0, True), output
    async with topics_left_in(run.root) as bus:
        said, grades = await messages_on(bus, BATCHES), await messages_on(bus, GRADES)
    scores = [one.group_id for one in grades.on(GROUP_GRADED)]
    assert sorted(set(scores)) == sorted(scores) == sorted(one.group_id for one in said.on(GROUP_COMPLETED))
    trained = [group for packed in said.on(BATCH_PACKED) for group in packed.groups]
    assert len({group.prompt_id for group in trained}) == len(trained) == 9 * 8
    for group in trained:  # scores of a tournament lie in [0, 1] and add up to half the size of the group
        assert sum(member.reward for member in group.members) == pytest.approx(len(group.members) / 2)
    assert run.summary["failed_trajectories_by_reason"] == {}
