"""A fork of a run whose stage was switched: it goes on in that stage, and begins none a second time."""

from pathlib import Path

import pytest

from asyncrl.run.directory import RunFiles
from harness.audited import audited_clean, messages_on
from harness.runs import SHORT, WITHOUT_MODEL, fork, topics_left_in, up
from topics.batches import BATCH_PACKED
from topics.prompts import PROMPT_ISSUED
from topics.stages import STAGE_BEGAN
from topics.topic import BATCHES, PROMPTS

pytestmark = pytest.mark.slow

CONFIG = (
    SHORT
    + """checkpoint_every = 1
[stages.hot]
at_step = 2
group_size = 3
temperature = 1.2
loss = "reinforce"
[nats]
keep = "run"
"""
)


async def test_a_fork_behind_a_switch_goes_on_in_that_stage(tmp_path: Path):
    async with up(tmp_path, *WITHOUT_MODEL, "warmup.steps=4", "learner.steps=8", config=CONFIG) as run:
        assert await run.ended() == 0, run.story
    async with topics_left_in(run.root) as bus:
        [began] = (await messages_on(bus, PROMPTS)).on(STAGE_BEGAN)
        batches = (await messages_on(bus, BATCHES)).on(BATCH_PACKED)
    at = next(batch.step for batch in batches if batch.objective.stage == "hot")
    assert 2 < at < 8

    async with fork(tmp_path, "short", "behind", "--at", str(at), "--set", f"learner.steps={at + 2}") as new:
        assert await new.ended() == 0, new.story

    start = RunFiles(new.root).read_config().start
    assert (start.step, start.stages) == (at, {str(began.prompt): "hot"})
    async with topics_left_in(new.root) as bus:
        prompts = await messages_on(bus, PROMPTS)
        packed = (await messages_on(bus, BATCHES)).on(BATCH_PACKED)
    assert prompts.on(STAGE_BEGAN) == []
    issued = [one for one in prompts.on(PROMPT_ISSUED) if one.stage == "rl"]
    assert {(one.group_size, one.temperature) for one in issued} == {(3, 1.2)}
    follows = [(batch.step, batch.objective.stage, batch.objective.loss) for batch in packed]
    assert follows == [(step, "hot", "reinforce") for step in (at + 1, at + 2)]
    await audited_clean(tmp_path, "behind")
