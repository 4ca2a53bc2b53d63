"""A run of a model with experts whose routing is replayed, and whose processes are killed."""

from pathlib import Path

import numpy as np
import pytest

from asyncrl.crash import CRASH_FOLDER, arm
from asyncrl.training.create import write_tokenizer
from harness.audited import assert_consistent, audited_clean, messages_on, topics_left_by
from harness.gated import closed_gate
from harness.mixtures import MIXTURE, write_transformers_model
from harness.runs import up
from topics.topic import TRAJECTORIES
from topics.trajectories import TRAJECTORY_GENERATED

TURNS = """
from gated import pass_gate

async def rollout(row, context):
    ids = context.tokenizer.encode_prompt(row, max_tokens=None)
    found = await context.generate(ids, max_new_tokens=4)
    await context.tool("look", int)
    await context.generate([*ids, *found.tokens.tolist(), ids[-1]], max_new_tokens=4)
    await pass_gate(context)
"""


@pytest.mark.slow
async def test_experts_outlive_their_workers_and_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Workers die inside the experts of a blob, between these and their message, and behind it, and an engine dies that
    samples; each trajectory has a turn, a tool call, and one more turn.
    """
    (tmp_path / "rollouts.py").write_text(TURNS)
    write_transformers_model(tmp_path / "mixture", "qwen3_moe", MIXTURE)
    write_tokenizer(tmp_path / "mixture", "abcdefghijklmnopqrstuvwxyz^=", context=64)
    monkeypatch.setenv(CRASH_FOLDER, str(tmp_path / "points"))
    points = [arm(tmp_path / "points", name, "rollout") for name in ("blob.stored", "blob.inside", "progress.stored")]
    settings = [f"model.path={tmp_path / 'mixture'}", "learner.routing=replay", "learner.steps=4", "nats.keep=run"]
    settings += ["task.rollout=rollouts.py:rollout", "buffer.max_lag=1"]
    gate = closed_gate(tmp_path, 2)
    async with up(tmp_path, *settings) as run:
        await run.reaches(lambda: not any(point.exists() for point in points), "a death at each point")
        await run.reaches(lambda: len(run.steps()) >= 2, "the second step")
        await run.kill("engine-1")
        gate.unlink()
        assert await run.ended() == 0, run.story

    assert_consistent(run, steps=4, warmup_steps=4)
    async with topics_left_by(run) as bus:
        results = (await messages_on(bus, TRAJECTORIES)).on(TRAJECTORY_GENERATED)
    assert all((one.routing is None) == (one.stage == "warmup") for one in results)
    known = np.concatenate([np.frombuffer(one.routing.known, np.uint8) for one in results if one.routing is not None])
    tokens = sum(one.routing.tokens[-1] for one in results if one.routing is not None)
    assert np.unpackbits(known).sum() > 0.8 * tokens  # all but the last of each, and what the engine took along
    await audited_clean(tmp_path)
