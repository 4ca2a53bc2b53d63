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
    Path(__file__).with_name("opening").touch()
    time.sleep(600)
    return [{"prompt": "^ab=", "label": "ba"}]
"""


def opens_data(run: Run) -> bool:
    return (run.folder / "opening").exists()


def has_server(run: Run) -> bool:
    return run.server() is not None


def has(actor_id: str) -> Callable[[Run], bool]:
    return lambda run: run.actor(actor_id) is not None


@pytest.mark.slow
@pytest.mark.parametrize("stage", [has_server, opens_data])
async def test_sigterm_ends_a_launch_before_its_actors_start(tmp_path: Path, stage: Callable[[Run], bool]):
    (tmp_path / "slow.py").write_text(SLOW_DATA)
    async with up(tmp_path, *WITHOUT_MODEL, "task.source=slow.py:rows", "task.options={}") as run:
        await run.reaches(lambda: stage(run), "the stage of the launch")
        run.process.send_signal(signal.SIGTERM)
        assert await run.ended(LIMIT_S) in (0, -signal.SIGTERM), run.story
    assert not run.processes()


@pytest.mark.slow
@pytest.mark.parametrize("actor_id", ["supervisor-1", "prompter-1", "learner-1"])
async def test_sigterm_ends_a_launch_while_its_actors_start(tmp_path: Path, actor_id: str):
    async with up(tmp_path) as run:
        await run.reaches(lambda: has(actor_id)(run), f"{actor_id} starts")
        run.process.send_signal(signal.SIGTERM)
        assert await run.ended(LIMIT_S) == 0, run.story
    async with resume(tmp_path, "short", "--skip-batch", "9") as failing:
        await failing.reaches(lambda: has_server(failing), "its server is there")
        failing.process.send_signal(signal.SIGTERM)
        assert await failing.ended(LIMIT_S) in (0, 1), failing.story


async def test_a_function_on_a_daemon_thread_answers_raises_or_is_left_alone():
    assert await on_daemon_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await on_daemon_thread(divmod, 7, 0)
    goes_on = threading.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await on_daemon_thread(goes_on.wait)
    goes_on.set()
