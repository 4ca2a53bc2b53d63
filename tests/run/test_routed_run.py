"""A whole run whose workers sample through `sglang-router` in front of embedded engines."""

import json
from pathlib import Path

import pytest

from harness.audited import assert_consistent, assert_within_lag
from harness.runs import command, kill, up

pytestmark = pytest.mark.slow


async def test_a_run_behind_a_router_loses_nothing_when_router_and_engine_are_killed(tmp_path: Path):
    async with up(tmp_path, "engine.count=2", "engine.router.count=1", "learner.steps=8", "buffer.max_lag=2") as run:
        await run.reaches(lambda: bool(run.steps()), "the first step")
        code, output = await command(tmp_path, "engines", "--json")
        assert [row["name"] for row in json.loads(output)] == ["engine-1", "engine-2", "router-1"]
        assert (json.loads(output)[2]["kind"], json.loads(output)[2]["address"][:17]) == ("router", "http://127.0.0.1:")
        router = run.actor("router-1")
        assert router is not None
        kill(router)  # the router's process ends with its actor
        before = len(run.steps())
        await run.reaches(lambda: len(run.steps()) >= before + 1, "a step behind the new router")
        engine = run.actor("engine-2")
        assert engine is not None
        kill(engine)
        assert await run.ended() == 0, run.story
        code, output = await command(tmp_path, "audit")

    assert code == 0, output
    assert_consistent(run, steps=8, warmup_steps=4)
    assert_within_lag(run, max_lag=2)
    assert "Error handling" not in (run.root / "logs" / "engine-1.server.log").read_text()  # of the router's probes
