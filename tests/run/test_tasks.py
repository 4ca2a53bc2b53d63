"""A run of two tasks with rules of their own, whose prompter is killed: every record names the task, and all add up."""

import json
from pathlib import Path

import pytest

from asyncrl.config.tasks import Mixture
from asyncrl.run.directory import RunFiles
from harness.audited import messages_on
from harness.configs import TWO_TASKS
from harness.gated import closed_gate
from harness.runs import command, topics_left_in, up
from topics.batches import BATCH_PACKED
from topics.prompts import PROMPT_ISSUED
from topics.topic import BATCHES, GRADES, PROMPTS, TRAJECTORIES
from topics.trajectories import TRAJECTORY_GENERATED, TRAJECTORY_GRADED

pytestmark = pytest.mark.slow

CONFIG = (
    TWO_TASKS
    + """
tasks.words.temperature = 0.8
tasks.words.rollout = "gated.py:rollout"
tasks.sums.rollout = "own.py:rollout"
tasks.sums.reward = "own.py:reward"
tasks.sums.group_size = 3
tasks.sums.temperature = 1.3
tasks.sums.advantage = "centered"
[warmup]
steps = 4
batch_rows = 32
rows_per_trajectory = 16
lr_warmup_steps = 2
[rollout]
group_size = 4
max_new_tokens = 7
[buffer]
batch_groups = 6
[learner]
steps = 6
lr = 1e-3
checkpoint_every = 4
[eval]
prompts = 6
[nats]
keep = "run"
"""
)
OWN = """
from gated import pass_gate

async def rollout(row, context):
    await context.generate(context.tokenizer.encode_prompt(row, max_tokens=None), max_new_tokens=5)
    await pass_gate(context)
    context.outcome(metrics={"asked": 1.0})

def reward(completion: str) -> dict:
    return {"reward": len(set(completion)) / 8, "letters": len(completion)}
"""
RULES = {"words": (4, 0.8, "grpo"), "sums": (3, 1.3, "centered")}


async def test_two_tasks_with_rules_of_their_own_are_mixed_trained_and_accounted_for(tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    gate = closed_gate(tmp_path, 2)
    async with up(tmp_path, config=CONFIG) as run:
        await run.reaches(lambda: 2 in run.steps(), "its second step")
        await run.kill("prompter-1")
        gate.unlink()
        assert await run.ended() == 0, run.story

    for (code, output), end in (
        (await command(tmp_path, "audit", "short", "--deep"), ": clean\n"),
        (await command(tmp_path, "replay", "short"), "10 steps, all 7 published versions bit-equal"),
    ):
        assert (code, end in output, "not compared" in output) == (0, True, False), output
    mixture = Mixture(RunFiles(run.root).read_config())
    async with topics_left_in(run.root) as bus:
        issued = (await messages_on(bus, PROMPTS)).on(PROMPT_ISSUED)
        generated = (await messages_on(bus, TRAJECTORIES)).on(TRAJECTORY_GENERATED)
        grades = (await messages_on(bus, GRADES)).on(TRAJECTORY_GRADED)
        ends = await messages_on(bus, BATCHES)
    task_of = {one.trajectory_id: one.task for one in issued}
    for one in issued:
        if one.stage == "rl":
            assert one.task == mixture.task(int(one.prompt_id[1:])).name
            assert (one.group_size, one.temperature, one.estimator) == RULES[one.task]
    assert {one.task for one in issued if one.stage == "warmup"} == {"warmup"}
    assert all(one.task == task_of[one.trajectory_id] for one in [*generated, *grades])
    batches = [batch for batch in ends.on(BATCH_PACKED) if batch.stage == "rl"]
    for batch in batches:
        for group in batch.groups:
            size, *rules = RULES[group.task]
            assert (group.temperature, group.estimator) == tuple(rules)
            assert 1 <= len(group.members) <= size  # a member that became too old was dropped
        means = {
            task: [member.reward for group in batch.groups if group.task == task for member in group.members]
            for task in RULES
        }
        [row] = [row for row in run.rows() if row["step"] == batch.step]
        for task, rewards in means.items():
            if rewards:
                assert row[f"task/{task}/reward_mean"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-6)
                assert row[f"task/{task}/trajectories"] == len(rewards)
        assert row.get("reward/asked") == (1.0 if means["sums"] else None)
    trained = [group.task for batch in batches for group in batch.groups]
    assert trained.count("words") > trained.count("sums") > 0
    assert all(row.keys() >= {"task/words/accuracy", "task/sums/accuracy"} for row in run.rows("eval"))
    lines = (run.root / "samples.jsonl").read_text().splitlines()
    samples = [sample for line in lines for sample in json.loads(line)["samples"]]
    assert all(sample["task"] == task_of[sample["name"]] for sample in samples)
    code, text = await command(tmp_path, "samples", "short", "--step", "6")
    assert code == 0, text
    assert "  words  reward" in text or "  sums  reward" in text
