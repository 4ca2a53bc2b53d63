"""PPO with critic and adapters as a user runs it: a killed learner goes on, and a replay has the same bits."""

from pathlib import Path

import pytest

from harness.gated import closed_gate
from harness.runs import command, up

pytestmark = pytest.mark.slow
PPO = ("advantage=gae", "loss=ppo", "lora.rank=4", "critic.warmup_steps=2", "critic.lr=1e-3", "reference.kl_coef=0.01")


@pytest.mark.real_start
async def test_ppo_goes_on_after_a_kill_and_is_replayed_bit_for_bit(tmp_path: Path):
    settings = ["learner.steps=6", "learner.checkpoint_every=3", "nats.keep=run", *(f"learner.{one}" for one in PPO)]
    settings += ["task.rollout=gated.py:rollout", "buffer.max_lag=1"]
    gate = closed_gate(tmp_path, 4)
    async with up(tmp_path, *settings) as run:
        await run.reaches(lambda: 4 in run.steps(), "step 4")
        await run.kill("learner-1")
        gate.unlink()
        assert await run.ended() == 0, run.story

    rows = {row["step"]: row for row in run.rows() if row["step"] > 0}
    assert ["grad_norm" in rows[step] for step in sorted(rows)] == [False, False, True, True, True, True]
    assert all({"value_loss", "explained_variance", "reference_kl"} <= rows[step].keys() for step in (3, 4, 5, 6))
    assert "weights unchanged" not in run.out
    code, output = await command(tmp_path, "replay", "short")
    assert code == 0, output
    assert output.endswith("published versions bit-equal\n")
