"""Nothing that a user's function starts outlives its limit or its child, whatever it forks and however it ends."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from asyncrl.config.settings import RewardSettings
from harness.child_graders import asked, failing, grading, outcomes, run_parent
from harness.runs import all_processes
from harness.stage import DEADLINE_S, until

LIMIT_S, LONG_S = 1.0, 60.0  # of a call that shall run into it, and of one that shall not


class Traces:
    """Processes of this test, found by an environment variable that they inherit."""

    def __init__(self, mark: str) -> None:
        self._mark = f"ASYNCRL_TEST_FUNCTION={mark}".encode()

    def left(self, program: str = "") -> dict[int, str]:
        """Command lines of those that live, by process id."""
        return {
            pid: line for pid, line, environment in all_processes() if self._mark in environment and program in line
        }


@pytest.fixture
async def traces(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Traces]:
    """Sees to it that nothing is left when the test ends."""
    mark = secrets.token_hex(8)
    monkeypatch.setenv("ASYNCRL_TEST_FUNCTION", mark)
    traces = Traces(mark)
    yield traces
    left = traces.left()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


# What a call leaves behind, by the name of the way, and how it ends.
WAYS = '''
import ctypes, multiprocessing, os, signal, subprocess, sys, time

def fork():
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,)).start()

def program():
    subprocess.Popen(["sleep", "1000"])

def session():
    subprocess.Popen(["sleep", "1000"], start_new_session=True)

def daemon():
    """Forks twice, leaves its session, and keeps every pipe open."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "1000"])
        os._exit(0)
    os.wait()

def runner():
    """Is never the same process for long, nor in the same session."""
    if os.fork() == 0:
        while True:
            if os.fork():
                os._exit(0)
            os.setsid()

def several():
    """Forks as fast as it can, up to a number that a machine bears."""
    if os.fork() == 0:
        for _ in range(7):
            os.fork()
        time.sleep(1000)

def crash():
    os.kill(os.getpid(), signal.SIGKILL)

def exit():
    os._exit(7)

def segfault():
    ctypes.string_at(0)

def abort():
    os.abort()

def hang():
    while True:
        pass

def closed():
    """Ends nothing but its pipes."""
    os.closerange(3, 256)
    time.sleep(1000)

def orphaned():
    """Kills its supervisor."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)

def stopped():
    """Stops its supervisor, and hangs."""
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(1000)

def reward(completion):
    ways = completion.split()
    for way in ways:
        globals()[way]()
    return float(os.getpid())
'''


@pytest.mark.parametrize(
    ("ways", "reason", "detail", "limit_s"),
    [
        ("fork crash", "exited", "killed by SIGKILL, as the kernel does where the machine has no memory left", LONG_S),
        ("program exit", "exited", "exit code 7", LONG_S),
        ("session exit", "exited", "exit code 7", LONG_S),
        ("daemon segfault", "exited", "killed by SIGSEGV", LONG_S),
        ("runner exit", "exited", "exit code 7", LONG_S),
        ("fork program session daemon runner several hang", "time_limit", "no answer within 1 s", LIMIT_S),
        ("program abort", "exited", "killed by SIGABRT, as native code ends that needs", LONG_S),
        ("closed", "exited", "killed by SIGKILL", LONG_S),
        ("daemon closed", "time_limit", "no answer within 1 s", LIMIT_S),
        ("fork orphaned", "exited", "killed by SIGKILL", LONG_S),
        ("daemon stopped", "time_limit", "no answer within 1 s", LIMIT_S),
    ],
)
async def test_nothing_outlives_a_call_that_ends_its_process(
    tmp_path: Path, traces: Traces, ways, reason, detail, limit_s
):
    async with grading(tmp_path, WAYS, time_limit_s=limit_s, memory_mb=1000) as grader:
        first = int((await grader.grade(asked(""))).reward)
        failed = await asyncio.wait_for(failing(grader, asked(ways)), DEADLINE_S)

        assert (failed.reason, detail in failed.detail) == (reason, True), failed
        second = int((await asyncio.wait_for(grader.grade(asked("")), DEADLINE_S)).reward)
        assert first != second
        assert second in traces.left()
        assert {line.split()[0] for line in traces.left().values()} == {traces.left()[second].split()[0]}
        assert len(traces.left()) == 2  # the child and its supervisor


@pytest.mark.parametrize("ways", ["program", "session", "daemon", "runner"])
async def test_nothing_is_left_when_the_grader_is_closed(tmp_path: Path, traces: Traces, ways: str):
    async with grading(tmp_path, WAYS, workers=2) as grader:
        assert len(await outcomes(grader, [ways] * 2)) == 2
        assert traces.left()

    assert traces.left() == {}


def test_nothing_is_left_when_the_worker_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mark = secrets.token_hex(8)
    monkeypatch.setenv("ASYNCRL_TEST_FUNCTION", mark)
    source = WAYS + "\ndef reward(completion):\n    session(), daemon(), several()\n    return float(os.getpid())\n"

    done = run_parent(tmp_path, source, dies=True)

    assert done.returncode == -signal.SIGKILL
    asyncio.run(until(lambda: not Traces(mark).left(), "nothing is left"))


async def test_what_lost_its_parents_ends_within_two_limits_and_the_child_goes_on(tmp_path: Path, traces: Traces):
    source = """
    import os, subprocess
    def reward(completion):
        if completion == "pid":
            return float(os.getpid())
        return float(subprocess.check_output("sleep 1000 > /dev/null & echo $!", shell=True, start_new_session=True))
    """
    async with grading(tmp_path, source, time_limit_s=LIMIT_S) as grader:
        (pid,) = await outcomes(grader, ["pid"])
        (orphan,) = await outcomes(grader, ["x"])
        await until(lambda: int(orphan) not in traces.left(), "what has no parents is ended")
        assert await outcomes(grader, ["pid"]) == [pid]


async def test_an_async_call_past_its_limit_takes_what_it_started_with_it(tmp_path: Path, traces: Traces):
    source = """
    import asyncio, os
    async def reward(completion):
        if completion == "sleep":
            process = await asyncio.create_subprocess_exec("sleep", "1000")
            await process.wait()
        return os.getpid()
    """
    async with grading(tmp_path, source, time_limit_s=LIMIT_S) as grader:
        first, failed = await outcomes(grader, ["x", "sleep"])
        assert failed == "time_limit"

        await until(lambda: not traces.left("sleep"), "the program has ended")
        assert (await outcomes(grader, ["x"]))[0] != first


# Memory


BOMBS = """
import os, subprocess, sys
import numpy
def reward(completion):
    if completion == "list":
        return len([bytes(1_000_000) for _ in range(10_000)])
    if completion == "array":
        return numpy.ones((100_000, 100_000)).sum()
    if completion == "program":
        subprocess.run([sys.executable, "-c", "bytearray(10**10)"], check=True)
    return 1.0
"""


async def test_more_memory_than_allowed_fails_the_call_with_a_reason_and_the_child_goes_on(
    tmp_path: Path, traces: Traces
):
    async with grading(tmp_path, BOMBS, memory_mb=500) as grader:
        for bomb in ("list", "array"):
            failed = await failing(grader, asked(bomb))
            assert failed.reason == "memory"
            assert failed.detail.startswith("it needed more than reward.memory_mb = 500 MB\n")
        assert "returned non-zero exit status 1" in (await failing(grader, asked("program"))).detail
        assert await outcomes(grader, ["fine"]) == [1.0]


async def test_the_default_limit_is_enough_for_torch(tmp_path: Path):
    source = (
        "import torch\ndef reward(completion):\n    return torch.ones(1000, 1000).matmul(torch.ones(1000)).mean()\n"
    )
    async with grading(tmp_path, source, memory_mb=RewardSettings().memory_mb) as grader:
        assert await outcomes(grader, ["x"]) == [1000.0]


async def test_a_file_that_needs_too_much_memory_at_its_import_is_named(tmp_path: Path):
    from asyncrl.errors import FunctionError

    with pytest.raises(FunctionError, match=r"MemoryError\nit may take reward.memory_mb = 500 MB"):
        async with grading(tmp_path, "TABLE = bytearray(10**10)\ndef reward(completion): ...", memory_mb=500):
            pass


# Floods


def test_a_flood_of_output_is_cut_and_counted(tmp_path: Path):
    source = """
    import os, time
    def reward(completion):
        print("the beginning", flush=True)
        for _ in range(1000):
            os.write(1, b"x" * 100_000)
        time.sleep(0)
        return 1.0
    """
    done = run_parent(tmp_path, source, dies=False)

    assert done.stdout == "1\n"
    assert done.stderr.startswith("the beginning")
    assert "bytes of output left out]" in done.stderr
    assert len(done.stderr) < 1_000_000


async def test_an_answer_without_end_fails_the_call(tmp_path: Path):
    source = "def reward(completion):\n    return {'reward': 1} | {str(n): n for n in range(200_000)}\n"
    async with grading(tmp_path, source) as grader:
        failed = await failing(grader, asked())

    assert failed.reason == "value"
    assert "found 200000 metrics, expected at most 32" in failed.detail


_REPLY_OF_NO_TEXT = b"\x06\x00\x00\x00\x94\x01\xc0\xc0\xa1\xff"  # a frame whose string is no UTF-8


@pytest.mark.parametrize("written", [b"garbage" * 100, _REPLY_OF_NO_TEXT], ids=["garbage", "no text"])
async def test_a_function_that_writes_into_the_pipe_of_the_answers_fails_alone(
    tmp_path: Path, traces: Traces, written: bytes
):
    source = f"""
    import os, time
    def reward(completion):
        if completion == "write":
            for number in range(3, 64):
                try:
                    os.write(number, {written!r})
                except OSError:
                    pass
            time.sleep(1000)
        return 1.0
    """
    async with grading(tmp_path, source) as grader:
        assert await outcomes(grader, ["fine", "write", "fine"]) == [1.0, "exited", 1.0]
        assert "wrote into the pipe of its answers" in (await failing(grader, asked("write"))).detail
