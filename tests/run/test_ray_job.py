"""A run that `ray job submit` starts through Ray's server for jobs, and that commands reach from outside."""

import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest

from asyncrl.ports import free_port
from asyncrl.process import python
from benchmarks.ray_nodes import ray_nodes
from harness.audited import audited_clean
from harness.paced import __file__ as paced
from harness.runs import LIMIT_S, SHORT, WITHOUT_MODEL, command
from harness.stage import until

HAS_SERVER = importlib.util.find_spec("opencensus") and importlib.util.find_spec("aiohttp_cors")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(not HAS_SERVER, reason="Ray has no server for jobs here: pip install 'ray[default]'"),
]
WAITS = '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}}'


async def job(url: str, *words: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *python("-m", "ray.scripts.scripts", "job", words[0], "--address", url, *words[1:]),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(LIMIT_S):
        said = (await process.communicate())[0].decode()
    assert process.returncode == 0, said
    return said


async def test_a_submitted_run_is_scaled_and_followed_from_outside_and_stopped_with_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sent = tmp_path / "sent"
    sent.mkdir()
    slow = "    await asyncio.sleep(1.0)"
    (sent / "own.py").write_text(Path(paced).read_text().replace(slow, f'    print("answers", flush=True)\n{slow}'))
    (sent / "own.toml").write_text(SHORT)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with ray_nodes(2, 2, dashboard_port=port) as nodes:
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)  # there may be other clusters on this machine
        settings = [*WITHOUT_MODEL, 'weights.store="stream"', "learner.steps=20000", "task.rollout=own.py:rollout"]
        settings += ["placement.kind=ray", f"placement.folder={tmp_path}/hosts"]
        words = [word for one in (*settings, f"directory={tmp_path}/runs") for word in ("--set", one)]
        up = (sys.executable, "-P", "-m", "asyncrl.cli.main", "up", "own.toml", *words)
        given = ("--working-dir", str(sent), "--runtime-env-json", WAITS, "--submission-id", "own", "--no-wait")
        await job(url, "submit", *given, "--", *up)

        async def trains() -> bool:
            said = await job(url, "logs", "own")
            assert "failed" not in said, said
            return " of 20000 " in said

        await until(trains, "it trains", LIMIT_S)
        code, said = await command(tmp_path, "scale", "short", "rollout=3")
        assert code == 0, said
        assert nodes.found("actors.main rollout rollout-3")
        code, said = await command(tmp_path, "logs", "short", "rollout-1")
        assert code == 0, said
        assert "answers" in said
        code, said = await command(tmp_path, "doctor", "short")
        assert code == 0, said
        code, said = await command(tmp_path, "chaos", "--run", "short", "--targets", "node", "--kills", "1")
        assert code == 0, said

        await job(url, "stop", "own")
        assert "to continue: asyncrl up --resume" in await job(url, "logs", "own")
    await audited_clean(tmp_path)
