"""Profiles and stacks of the actors of a real run, and of a server with SGLang's API."""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from aiohttp import web

from asyncrl.engine.sglang.profile import record_server
from asyncrl.errors import AsyncRLError
from harness.runs import command, up
from harness.stage import until

PY_SPY = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


async def test_a_live_run_gives_traces_of_steps_stacks_and_samples_of_stacks(tmp_path: Path):
    async with up(tmp_path, "learner.steps=100000") as run:
        await until(lambda: "short" in str(run.root) and (run.root / "metrics.jsonl").exists(), "the first step")
        code, output = await command(tmp_path, "profile", "learner", "--steps", "2")
        assert code == 0, output
        traces = sorted((run.root / "profiles").glob("learner-1-step*-rank0.json"))
        assert len(traces) == 2 and all(json.loads(path.read_bytes())["traceEvents"] for path in traces)

        code, output = await command(tmp_path, "stack", "rollout-1")
        assert code == 0 and "most recent call first" in output and "uvloop" in output, output
        code, output = await command(tmp_path, "stack", "rollout-9")
        assert code != 0 and "rollout-9" in output

        code, output = await command(tmp_path, "profile", "reward-1", "--seconds", "1")
        if PY_SPY is None:
            assert code == 1 and "py-spy is not installed" in output
        else:
            assert code == 0 or "ptrace_scope" in output, output

        code, output = await command(tmp_path, "profile", "engine-1")
        assert code == 1 and "records no profile" in output, output
        code, output = await command(tmp_path, "status", "--json")
        kinds = [(one["actor_id"], one["kind"]) for one in json.loads(output)["profiles"]]
        assert kinds[:3] == [("learner-1", "steps"), ("learner-1", "steps"), ("rollout-1", "stack")]
        assert all((run.root / one["path"]).exists() for one in json.loads(output)["profiles"])


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_server_records_itself_between_two_requests(tmp_path: Path, refuses: bool):
    asked: list[tuple[str, str, object]] = []

    async def take(request: web.Request) -> web.Response:
        asked.append((request.path, request.headers["Authorization"], await request.json()))
        return web.Response(status=404 if refuses else 200)

    app = web.Application()
    app.router.add_post("/{name}", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        if refuses:
            with pytest.raises(AsyncRLError, match="status 404"):
                await record_server(address, "key", tmp_path, 0.0)
            return
        await asyncio.wait_for(record_server(address, "key", tmp_path, 0.0), 30.0)
    finally:
        await runner.cleanup()
    assert asked == [
        ("/start_profile", "Bearer key", {"output_dir": str(tmp_path)}),
        ("/stop_profile", "Bearer key", {}),
    ]
