"""Whole runs with programs in sandboxes, in which workers, sandboxes, their server and NATS are killed.

The scripted policy is always right: a reward below 1 would be a fault of a machine that is graded as one of the policy.
"""

import json
from pathlib import Path

import pytest

from harness.audited import audited_clean
from harness.runs import up
from harness.sandbox_kills import KINDS, kill_often, pool_in
from harness.sandboxes import settings_of
from harness.stage import until

RUN = """
run = "short"
[task]
source = "rows.jsonl"
rollout = "harness:work"
[reward]
function = ""
[model]
create.template = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '=' }}{% endfor %}"
[harnesses.work]
kind = "mini"
file = "f"
check = ["sh", "-c", "sleep 0.4; test -e prepared"]
turns = 1
[sandbox]
kind = "http"
ready = 4
[rollout]
workers = 2
slots = 4
group_size = 4
[workers]
lease_s = 1.0
[buffer]
batch_groups = 4
max_lag = 16
[learner]
trainer = "scripted"
keep_versions = 18
checkpoint_every = 1000
[engine]
kind = "scripted"
[recorder]
plot = false
[supervision]
restart_pause_s = 1.0
"""
ROW = {
    "prompt": "^ab=",
    "metadata": {
        "setup": ["sh", "-c", "sleep 0.3; touch prepared"],
        "tests": {"made": ["sh", "-c", "test -s f && test -e prepared"]},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "every_s", "steps", "step_s", "seed"),  # at night 200 kills
    [(4, 0.5, 4, 0.5, 0), *(pytest.param(40, 2.0, 60, 2.0, seed, marks=pytest.mark.nightly) for seed in range(1, 6))],
)
async def test_kills_lose_no_trajectory_repeat_none_fail_none_and_leave_nothing(
    kills: int, every_s: float, steps: int, step_s: float, seed: int, tmp_path: Path
):
    settings_of("bubblewrap")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({**ROW, "label": str(n)}) + "\n" for n in range(64)))
    paced = [f"learner.steps={steps}", f"learner.scripted_step_s={step_s}", "warmup.steps=0"]
    async with pool_in(tmp_path) as pool:
        await until(lambda: pool.server() is not None, "the server of sandboxes")
        async with up(tmp_path, f"sandbox.url={pool.url}", *paced, config=RUN) as run:
            await run.reaches(run.steps, "the first step")
            done = await kill_often(run, pool, kills=kills, every_s=every_s, seed=seed)
            assert await run.ended() == 0, run.story
            await pool.is_empty()
        summary = run.summary
        assert {row["reward/mean"] for row in run.rows() if row["stage"] == "rl"} == {1.0}
        assert (summary["trajectories_failed"], summary["dropped_trajectories_by_reason"]) == (0, {}), summary
        await audited_clean(tmp_path)

    assert done.total() == kills, done
    assert set(done) == set(KINDS)
