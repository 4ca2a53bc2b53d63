"""A whole run whose workers sample through `sglang-router` in front of embedded engines."""

import json
from pathlib import Path

import pytest

from harness.audited import assert_consistent, assert_within_lag
from harness.runs import PACED, command, kill, two_steps_more, up
from harness.sglang_like import like_sglang
from harness.stage import until

pytestmark = pytest.mark.slow


async def test_a_run_behind_a_router_loses_nothing_when_router_and_engine_are_killed(tmp_path: Path):
    async with up(tmp_path, "engine.count=2", "engine.router.count=1", "learner.steps=60", "buffer.max_lag=2") as run:
        await run.reaches(lambda: bool(run.steps()), "the first step")
        router = run.actor("router-1")
        assert router is not None
        kill(router)  # the router's process ends with its actor
        before = len(run.steps())
        await run.reaches(lambda: len(run.steps()) >= before + 1, "a step behind the new router")
        engine = run.actor("engine-2")
        assert engine is not None
        kill(engine)
        code, output = await command(tmp_path, "engines", "--json")
        assert [row["name"] for row in json.loads(output)] == ["engine-1", "engine-2", "router-1"]
        assert (json.loads(output)[2]["kind"], json.loads(output)[2]["address"][:17]) == ("router", "http://127.0.0.1:")
        assert await run.ended() == 0, run.story
        code, output = await command(tmp_path, "audit")

    assert code == 0, output
    assert_consistent(run, steps=60, warmup_steps=4)
    assert_within_lag(run, max_lag=2)
    assert "Error handling" not in (run.root / "logs" / "engine-1.server.log").read_text()  # of the router's probes


async def test_a_server_that_refuses_weights_gets_no_request_is_reported_and_holds_nobody_back(tmp_path: Path):
    async def refuses(_key: str) -> str:
        return "no such shape"

    async with like_sglang() as lent:
        lent.refusal = refuses
        groups = ("engine.groups.near.kind=embedded", "engine.groups.lent.kind=external")
        addresses = f'engine.groups.lent.addresses=["{lent.address}"]'
        async with up(tmp_path, *groups, addresses, "engine.router.count=1", PACED, "learner.steps=10000") as run:

            async def is_reported() -> bool:
                _, output = await command(tmp_path, "doctor")
                return "version not loaded: engine-lent-1" in output and "no such shape" in output

            await two_steps_more(run, "steps of the other server")
            await until(is_reported, "the doctor names it")
            await two_steps_more(run, "steps beside its restarts")
            code, _ = await command(tmp_path, "down")
            assert (code, await run.ended()) == (0, 0), run.story
        assert (lent.asked, lent.loads, lent.paused) == ([], [], False)

    assert "engine-lent-1 died: engine http://127.0.0.1" in run.out
    assert "0 failed" in run.out
    code, output = await command(tmp_path, "audit")
    assert code == 0, output
