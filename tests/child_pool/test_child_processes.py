"""Effects of a call on its process, and of a process on its calls: limits, deaths, neighbours, pipes, the end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import uvloop

from asyncrl.rewards.graders import GradeResult
from harness.child_graders import asked, ends, failing, grading, is_alive, outcomes, run_parent
from harness.stage import until

NAUGHTY = """
import asyncio, os, signal, sys
{kind}def reward(completion):
    if completion == "hang":
        while True: pass
    if completion == "exit":
        os._exit(7)
    if completion == "sysexit":
        sys.exit(8)
    if completion == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if completion == "raise":
        raise ValueError
    return os.getpid() if completion == "pid" else 1.0
"""
LIMIT_S = 1.0  # of calls beside one that shall run into it
SYNC, ASYNC = NAUGHTY.format(kind=""), NAUGHTY.format(kind="async ")


@pytest.mark.parametrize("source", [SYNC, ASYNC], ids=["sync", "async"])
async def test_a_hanging_call_is_killed_at_its_limit_and_the_next_gets_another_process(tmp_path, source):
    async with grading(tmp_path, source, time_limit_s=LIMIT_S) as grader:
        first = (await grader.grade(asked("pid"))).reward
        failed = await failing(grader, asked("hang"))
        second = (await grader.grade(asked("pid"))).reward

        assert failed.reason == "time_limit"
        assert failed.detail == "no answer within 1 s; the function's process was killed"
        assert first != second
        assert not is_alive(first)


@pytest.mark.parametrize("source", [SYNC, ASYNC], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("how", "exit_shown"), [("exit", "exit code 7"), ("sysexit", "exit code 8"), ("segfault", "killed by SIGSEGV")]
)
async def test_a_call_that_ends_its_process_reports_how_and_the_next_gets_another(tmp_path, source, how, exit_shown):
    async with grading(tmp_path, source) as grader:
        failed = await failing(grader, asked(how))

        assert failed.reason == "exited"
        assert failed.detail == f"the function's process ended: {exit_shown}"
        assert (await grader.grade(asked())).reward == 1.0


@pytest.mark.parametrize("source", [SYNC, ASYNC], ids=["sync", "async"])
@pytest.mark.parametrize("workers", [1, 2])
async def test_bad_calls_do_not_touch_their_neighbours(tmp_path, source, workers):
    bad = {3: "hang", 7: "exit", 8: "raise", 15: "segfault"}
    texts = [bad.get(number, "fine") for number in range(30)]
    reasons = {"hang": "time_limit", "exit": "exited", "raise": "raised", "segfault": "exited", "fine": 1.0}

    async with grading(tmp_path, source, workers=workers, time_limit_s=LIMIT_S) as grader:
        assert await outcomes(grader, texts) == [reasons[text] for text in texts]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_answers_that_were_written_before_a_process_ended_are_delivered(tmp_path, run):
    """The worker reads them late, when the process has ended with calls unread: nothing says that these were begun."""
    source = """
        import os, pathlib, time
        here = pathlib.Path(__file__).parent
        def reward(completion):
            with (here / "calls").open("a") as calls:
                calls.write(f"{completion} {os.getppid()}\\n")
            while completion == "0" and not (here / "go").exists():
                time.sleep(0.01)
            if completion == "2":
                os._exit(3)
            return float(completion)
        """
    calls = tmp_path / "calls"

    async def scenario() -> list[Any]:
        async with grading(tmp_path, source, workers=1) as grader:
            answers = asyncio.create_task(outcomes(grader, list("0123456")))
            await until(lambda: calls.exists() and calls.read_text().endswith("\n"), "the first call is begun")
            (tmp_path / "go").touch()
            assert ends(int(calls.read_text().split()[1]))  # meanwhile nothing is read here
            late = asyncio.create_task(grader.grade(asked("7")))  # is written before anything is read
            return [*await answers, (await late).reward]

    assert run(scenario()) == [0, 1, "exited", 3, 4, 5, 6, 7]
    assert [line.split()[0] for line in calls.read_text().splitlines()] == list("01234567")


async def test_the_limit_counts_from_the_beginning_of_a_calls_turn(tmp_path):
    source = "import time\ndef reward(completion):\n    time.sleep(0.1)\n    return 1.0\n"
    async with grading(tmp_path, source, time_limit_s=LIMIT_S) as grader:
        assert await outcomes(grader, ["x"] * 12) == [1.0] * 12  # the last waits longer than its limit


async def test_an_async_call_past_its_limit_is_cancelled_and_its_process_kept(tmp_path):
    source = """
    import asyncio, os
    async def reward(completion):
        if completion == "sleep":
            await asyncio.Event().wait()
        return os.getpid()
    """
    async with grading(tmp_path, source, time_limit_s=LIMIT_S) as grader:
        first, failed, second = await outcomes(grader, ["pid", "sleep", "pid"])

        assert failed == "time_limit"
        assert first == second == (await grader.grade(asked("pid"))).reward


async def test_a_cancelled_caller_leaves_the_others_alone(tmp_path):
    source = "import time\ndef reward(completion):\n    time.sleep(0.01)\n    return 1.0\n"
    async with grading(tmp_path, source) as grader:
        calls = [asyncio.create_task(grader.grade(asked())) for _ in range(20)]
        await asyncio.sleep(0)
        for call in calls[::2]:
            call.cancel()
        done = await asyncio.gather(*calls, return_exceptions=True)

    assert all(isinstance(result, asyncio.CancelledError) for result in done[::2])
    assert done[1::2] == [GradeResult(1.0)] * 10


async def test_a_process_that_ended_while_idle_is_replaced(tmp_path):
    async with grading(tmp_path, SYNC) as grader:
        pid = int((await grader.grade(asked("pid"))).reward)
        os.kill(pid, signal.SIGKILL)

        # The first call may still have been given to the dead process.
        results = [await outcomes(grader, ["fine"]) for _ in range(3)]

    assert results[1:] == [[1.0]] * 2


async def test_a_function_that_does_not_load_again_fails_its_calls_until_it_does(tmp_path):
    async with grading(tmp_path, SYNC) as grader:
        (tmp_path / "r.py").write_text("def (")
        assert await outcomes(grader, ["exit", "fine"]) == ["exited", "exited"]
        assert "does not start again" in (await failing(grader, asked())).detail

        (tmp_path / "r.py").write_text(SYNC)
        assert await outcomes(grader, ["fine"]) == [1.0]


async def test_closing_fails_calls_under_way_and_ends_the_processes(tmp_path):
    async with grading(tmp_path, SYNC, workers=2) as grader:
        pid = (await grader.grade(asked("pid"))).reward
        calls = [asyncio.create_task(failing(grader, asked("hang"))) for _ in range(20)]
        await asyncio.sleep(0)
        await grader.close()

        assert {failed.reason for failed in await asyncio.gather(*calls)} == {"closed"}
        assert not is_alive(pid)
        assert (await failing(grader, asked())).reason == "closed"


async def test_large_texts_pass_through_the_pipes(tmp_path):
    async with grading(tmp_path, "def reward(completion, metadata): return len(completion)") as grader:
        assert await outcomes(grader, ["a" * (1 << 20)] * 12) == [float(1 << 20)] * 12


# Child processes


def test_what_a_function_prints_goes_to_stderr_and_what_it_reads_is_empty(tmp_path):
    source = """
    import os, sys
    def reward(completion):
        print("said by print")
        os.write(1, b"said by write\\n")
        return len(sys.stdin.read()) + 5
    """
    done = run_parent(tmp_path, source, dies=False)

    assert done.stdout == "5\n"
    assert "said by print" in done.stderr
    assert "said by write" in done.stderr


def test_a_child_dies_with_its_parent_even_where_its_function_hangs(tmp_path):
    source = """
    import os, threading
    def reward(completion):
        threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()  # keeps the process busy for ever
        return os.getpid()
    """
    done = run_parent(tmp_path, source, dies=True)

    assert done.returncode == -signal.SIGKILL
    assert ends(int(done.stdout))


async def test_texts_that_no_message_can_hold_are_escaped(tmp_path: Path):
    source = """
        import json

        def reward(completion):
            if completion == "raises":
                raise ValueError(json.loads('"half \\\\ud83d"'))
            return {"reward": 1.0, json.loads('"\\\\ud83d"'): 2.0}
    """
    async with grading(tmp_path, source) as grader:
        failed = await failing(grader, asked("raises"))
        result = await grader.grade(asked("x"))

    assert (failed.reason, "ValueError: half \\ud83d" in failed.detail) == ("raised", True)
    assert result.metrics == {"\\ud83d": 2.0}
