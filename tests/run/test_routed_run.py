"""A run of a model with experts whose routing is replayed, and whose processes are killed."""

from pathlib import Path

import numpy as np
import pytest

from asyncrl.crash import CRASH_FOLDER, arm
from asyncrl.training.create import write_tokenizer
from harness.audited import assert_consistent, audited_clean, messages_on, topics_left_by
from harness.mixtures import MIXTURE, write_transformers_model
from harness.runs import up
from topics.topic import TRAJECTORIES
from topics.trajectories import TRAJECTORY_GENERATED


@pytest.mark.slow
async def test_experts_outlive_their_workers_and_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A worker dies inside the experts of a result, one between these and the result, and an engine that samples."""
    write_transformers_model(tmp_path / "mixture", "qwen3_moe", MIXTURE)
    write_tokenizer(tmp_path / "mixture", "abcdefghijklmnopqrstuvwxyz^=", context=64)
    monkeypatch.setenv(CRASH_FOLDER, str(tmp_path / "points"))
    points = [arm(tmp_path / "points", name, "rollout") for name in ("blob.stored", "blob.inside")]
    settings = [f"model.path={tmp_path / 'mixture'}", "learner.routing=replay", "learner.steps=3", "nats.keep=run"]
    async with up(tmp_path, *settings) as run:
        await run.reaches(lambda: not any(point.exists() for point in points), "a death at each point")
        await run.reaches(lambda: len(run.steps()) >= 2, "the second step")
        await run.kill("engine-1")
        assert await run.ended() == 0, run.story

    assert_consistent(run, steps=3, warmup_steps=4)
    async with topics_left_by(run) as bus:
        results = (await messages_on(bus, TRAJECTORIES)).on(TRAJECTORY_GENERATED)
    assert all((one.routing is None) == (one.stage == "warmup") for one in results)
    known = np.concatenate([np.frombuffer(one.routing.known, np.uint8) for one in results if one.routing is not None])
    tokens = sum(one.routing.tokens[-1] for one in results if one.routing is not None)
    assert np.unpackbits(known).sum() > 0.8 * tokens  # all but the last of each, and what the engine took along
    await audited_clean(tmp_path)
