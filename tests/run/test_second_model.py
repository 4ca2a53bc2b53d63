"""A whole run in which another model, with another vocabulary, answers the policy: its tokens are never trained."""

from pathlib import Path

import pytest

from asyncrl.training.init_model import ModelShape, create_model
from harness.audited import audited_clean, messages_on, topics_left_by
from harness.configs import the_problem
from harness.runs import UNTRAINED, up
from topics.topic import TRAJECTORIES
from topics.trajectories import TRAJECTORY_GENERATED

ALPHABET = "UVWXYZ!?"
ROLLOUT = f"""
import re

async def rollout(row, context):
    tokens = context.tokenizer.encode_prompt(row, max_tokens=None).tolist()
    tokens += (await context.generate(tokens, max_new_tokens=2)).tokens.tolist()
    said = await context.opponent("UVW", max_new_tokens=3)
    assert re.fullmatch(r"([{ALPHABET}]|<pad>|<bos>)*", said.text), said.text
    same = await context.opponent([3, 4, 5], max_new_tokens=3)
    assert len(said.tokens) and len(same.tokens) and max(said.tokens) < {3 + len(ALPHABET)}
    tokens += context.tokenizer.encode("=").tolist()
    await context.generate(tokens, max_new_tokens=2)
    context.outcome(float(len(said.text) % 2))
"""


@pytest.mark.slow
async def test_another_model_answers_the_policy_and_is_not_trained(tmp_path: Path):
    create_model(tmp_path / "other", alphabet=ALPHABET, seed=7, shape=ModelShape(context=32))
    (tmp_path / "talk.py").write_text(ROLLOUT)
    settings = ["engine.groups.train.kind=embedded", "engine.groups.other.kind=embedded", "eval.prompts=0"]
    settings += [f"engine.groups.other.model={tmp_path / 'other'}", "rollout.opponent_engines=other"]
    settings += [f"task.rollout={tmp_path / 'talk.py'}:rollout", "reward.function=", "learner.steps=4", "nats.keep=run"]
    async with up(tmp_path, *UNTRAINED, *settings) as run:
        await run.reaches(lambda: 1 in run.steps(), "its first step")
        await run.kill("engine-other-1")
        await run.kill("rollout-1")
        assert await run.ended() == 0, run.story
    await audited_clean(tmp_path)

    async with topics_left_by(run) as bus:
        results = (await messages_on(bus, TRAJECTORIES)).on(TRAJECTORY_GENERATED)
    sampled = [segment.mask.sum() for result in results for segment in result.segments]
    assert len(results) >= 4 * 8 * 4 and max(sampled) <= 4  # two answers of at most two tokens
    assert run.summary["failed_trajectories_by_reason"] == {}


def test_a_second_model_belongs_to_a_group_that_answers_for_no_policy():
    problem = the_problem("self-play", "engine.groups.train.model=models/other")

    assert problem.message.startswith(
        "the engines of engine.groups.train answer for the policy, and cannot have another"
    )
