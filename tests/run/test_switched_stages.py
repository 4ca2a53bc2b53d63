"""A run whose stage is switched while its prompter is killed: groups and batches obey their stages."""

from pathlib import Path

import pytest

from asyncrl.config.tasks import Mixture
from asyncrl.run.directory import RunFiles
from asyncrl.training.objective import objective_of
from harness.audited import messages_on
from harness.configs import TWO_TASKS
from harness.runs import command, topics_left_in, up
from topics.batches import BATCH_PACKED
from topics.prompts import PROMPT_ISSUED
from topics.stages import STAGE_BEGAN
from topics.topic import BATCHES, PROMPTS

pytestmark = pytest.mark.slow

CONFIG = (
    TWO_TASKS
    + """[stages.sums]
shares = { words = 0 }
group_size = 3
temperature = 1.2
advantage = "rloo"
loss = "ppo"
filters = ["length"]
lr = 2e-5
reference.kl_coef = 0.1
at_accuracy = -1.0
accuracy_groups = 3
[stages.last]
[rollout]
group_size = 4
max_new_tokens = 7
[buffer]
batch_groups = 4
[learner]
trainer = "scripted"
scripted_step_s = 0.2
steps = 10000
[engine]
kind = "scripted"
scripted_tokens = 4
[recorder]
plot = false
[nats]
keep = "run"
"""
)


async def test_a_stage_is_switched_without_a_restart_and_audited(tmp_path: Path):
    async with up(tmp_path, config=CONFIG) as run:
        await run.reaches(lambda: any(row.get("objective_stage") for row in run.rows()), "a step of a stage")
        code, output = await command(tmp_path, "stage", "short", "last")
        assert (code, output.startswith("stage last from prompt p0")) == (0, True), output
        await run.kill("prompter-1")
        await run.reaches(lambda: any(row.get("objective_stage") == "last" for row in run.rows()), "a step of that one")
        run.interrupt()
        assert await run.ended() == 0, run.story

    code, output = await command(tmp_path, "audit", "short", "--deep")
    assert (code, ": clean\n" in output, "not compared" in output) == (0, True, False), output
    async with topics_left_in(run.root) as bus:
        prompts = await messages_on(bus, PROMPTS)
        batches = (await messages_on(bus, BATCHES)).on(BATCH_PACKED)
    [began, last] = prompts.on(STAGE_BEGAN)
    assert (began.name, began.request, last.name, last.after) == ("sums", 0, "last", None)
    config = RunFiles(run.root).read_config()
    mixture, begun = Mixture(config), [(one.prompt, one.name) for one in (began, last)]
    issued = {int(one.prompt_id[1:]): one for one in prompts.on(PROMPT_ISSUED)}
    for number, one in issued.items():
        task = mixture.task(number, begun)
        assert (one.task, one.group_size, one.temperature) == (task.name, task.group_size, task.temperature)
        assert one.estimator == task.advantage
    assert {one.task for number, one in issued.items() if number < began.prompt} == {"words", "sums"}
    after = [one for number, one in issued.items() if began.prompt <= number < last.prompt]
    assert {(one.task, one.group_size, one.estimator) for one in after} == {("sums", 3, "rloo")}
    assert {issued[number].task for number in issued if number >= last.prompt} == {"words", "sums"}

    follows = [batch.objective.stage for batch in batches]
    assert list(dict.fromkeys(follows)) == [None, "sums", "last"]
    assert {
        (batch.objective.loss, batch.objective.learning_rate) for batch in batches if batch.objective.stage == "sums"
    } == {("ppo", 2e-5)}
    assert all(batch.objective == objective_of(config, batch.step, batch.objective.stage or "") for batch in batches)
    shown = {row["step"]: row.get("objective_stage") for row in run.rows()}
    assert shown.items() <= {batch.step: batch.objective.stage for batch in batches}.items()
    assert "sums" in shown.values()
