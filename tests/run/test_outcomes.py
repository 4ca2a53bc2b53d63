"""A whole run whose rewards are given by its rollout function alone."""

from pathlib import Path

import pytest

from harness.pages import written
from harness.runs import command, up

pytestmark = pytest.mark.slow


async def test_what_a_rollout_function_gives_is_trained_on_and_reaches_the_metrics_and_who_asks(tmp_path: Path):
    written("write-a-task.md", tmp_path)
    scripted = ["engine.kind=scripted", "learner.trainer=scripted", "warmup.steps=0", "learner.steps=3"]
    own = [f"task.rollout={tmp_path / 'guess.py'}:rollout", 'reward.function=""', "eval.prompts=0"]
    async with up(tmp_path, *scripted, *own) as run:
        assert await run.ended() == 0, run.story
        name = run.root.name

    assert run.steps() == [1, 2, 3]
    assert all(row["reward/letters"] > 0 for row in run.rows())
    assert run.summary["last_batch"]["reward/letters"] > 0
    code, text = await command(tmp_path, "samples", name, "--step", "3")
    assert code == 0, text
    assert " letters " in text
    assert "transcript: " in text
