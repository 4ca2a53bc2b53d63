"""A run with the megatron trainer as a user starts it, of which a rank is killed, and that torch goes on with."""

from pathlib import Path

import pytest

from harness.gated import closed_gate
from harness.runs import kill, resume, up

pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # two ranks of Megatron, then a run with torch
SETTINGS = (
    "model.create.kv_heads=2",
    "learner.trainer=megatron",
    "learner.ranks=2",
    "learner.layout.tensor=2",
    "learner.checkpoint_every=2",
    "buffer.max_lag=1",
    "task.rollout=gated.py:rollout",
)


@pytest.mark.real_start
async def test_a_rank_that_is_killed_goes_on_with_its_peers_from_their_checkpoint_and_torch_after_them(tmp_path: Path):
    gate = closed_gate(tmp_path, 3)
    async with up(tmp_path, *SETTINGS) as run:
        await run.reaches(lambda: 3 in run.steps(), "step 3")
        kill(next(pid for pid, line in run.processes().items() if "rank_process learner-1 1 " in line))
        gate.unlink()
        assert await run.ended() == 0, run.story

    assert sorted(set(run.steps())) == [1, 2, 3, 4, 5]
    assert "rank 1 ended" in run.log("learner-1")
    assert (run.root / "model" / "model.safetensors").is_file()

    alone = ["learner.steps=6", "learner.trainer=torch", "learner.ranks=1", "learner.layout.tensor=1"]
    async with resume(tmp_path, "short", *(word for one in alone for word in ("--set", one))) as longer:
        assert await longer.ended() == 0, longer.story
    assert sorted(set(longer.steps())) == [1, 2, 3, 4, 5, 6]
    assert "checkpoint unusable" not in longer.log("learner-1")
