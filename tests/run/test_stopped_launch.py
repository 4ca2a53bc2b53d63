"""SIGTERM ends `asyncrl up` at each stage of its launch, and a thread that is busy meanwhile does not delay it."""

import asyncio
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.background import on_daemon_thread
from harness.runs import WITHOUT_MODEL, Run, resume, up

LIMIT_S = 60.0  # six times as long as on a machine that does nothing else

SLOW_DATA = """
import time
from pathlib import Path

def rows(seed):
    if Path(__file__).with_name("slow").exists():
        Path(__file__).with_name("opening").touch()
        time.sleep(600)
    return [{"prompt": "^ab=", "label": "ba"}]
"""


async def terminated(run: Run, stage: Callable[[], object], what: str) -> int:
    """Send SIGTERM at a stage of a launch; returns the exit code."""
    await run.reaches(stage, what)
    run.process.send_signal(signal.SIGTERM)
    return await run.ended(LIMIT_S)


@pytest.mark.slow
async def test_sigterm_ends_a_launch_at_each_stage(tmp_path: Path):
    (tmp_path / "data.py").write_text(SLOW_DATA)
    data = ["task.source=data.py:rows", "task.options={}"]
    async with up(tmp_path, *WITHOUT_MODEL, *data) as run:
        assert await terminated(run, run.server, "its server is there") in (0, -signal.SIGTERM), run.story
    assert not run.processes()
    for actor_id in ("supervisor-1", "prompter-1", "learner-1"):
        async with up(tmp_path, *data, f"run={actor_id}") as run:
            assert await terminated(run, lambda run=run, name=actor_id: run.actor(name), actor_id) == 0, run.story
    (tmp_path / "slow").touch()
    async with resume(tmp_path, "learner-1") as run:
        assert await terminated(run, (tmp_path / "opening").exists, "its data is being opened") == 0, run.story
    (tmp_path / "slow").unlink()
    async with resume(tmp_path, "learner-1", "--skip-batch", "9") as run:
        assert await terminated(run, run.server, "a launch that fails has its server") in (0, 1), run.story


async def test_a_function_on_a_daemon_thread_answers_raises_or_is_left_alone():
    assert await on_daemon_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await on_daemon_thread(divmod, 7, 0)
    goes_on = threading.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await on_daemon_thread(goes_on.wait)
    goes_on.set()
