"""Whole runs as a user sees them: they learn, they are told truly, they grow, and they survive kill -9."""

from pathlib import Path

import pytest
from runs import Run, address_of, up

pytestmark = pytest.mark.slow


def assert_within_lag(run: Run, max_lag: int) -> None:
    lags = {int(lag) for lag in run.summary["trained_tokens_by_lag"]}
    assert lags
    assert lags <= set(range(max_lag + 1)), run.summary


def assert_consistent(run: Run, *, steps: int, warmup_steps: int) -> None:
    """The figures of a finished run agree with each other and with its rows."""
    summary, rows = run.summary, run.rows()
    dropped = sum(summary["dropped_trajectories_by_reason"].values())
    assert summary["finished"]
    assert [row["step"] for row in rows] == list(range(1 - warmup_steps, steps + 1))
    assert (summary["steps"], summary["warmup_steps"]) == (steps, warmup_steps)
    assert summary["trajectories_trained"] == sum(row["trajectories"] for row in rows if row["stage"] == "rl")
    assert summary["trained_tokens"] == sum(summary["trained_tokens_by_lag"].values()) <= summary["sampled_tokens"]
    assert summary["trajectories_trained"] + dropped <= summary["trajectories_issued"]
    assert 0 <= summary["rl_wall_s"] <= summary["wall_s"]


async def test_the_demo_learns_to_write_six_letters_backwards(tmp_path: Path):
    settings = ["task.options.letters=6", "warmup.steps=60", "learner.steps=80", "rollout.max_new_tokens=9"]
    async with up(tmp_path, *settings, "eval.prompts=128", cast="demo") as run:
        assert await run.ended() == 0, run.story
        print(run.out, run.summary)
        password = address_of(run).password
    assert_consistent(run, steps=80, warmup_steps=60)
    assert_within_lag(run, max_lag=1)
