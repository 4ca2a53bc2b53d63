from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from conftest import until

from asyncrl.tasks.child import read_signature
from asyncrl.tasks.functions import FunctionError
from asyncrl.tasks.rewards import Grader, GradeRequest, GradeResult, RewardFailed, open_grader

EXAMPLES = Path(__file__).parent.parent / "asyncrl" / "examples"


def asked(completion: str = "x", label: Any = None, **more: Any) -> GradeRequest:
    return GradeRequest(completion=completion, prompt="p", label=label, **more)


@asynccontextmanager
async def grading(folder: Path, source: str, *, spec: str = "r.py:reward", **options: Any) -> AsyncIterator[Grader]:
    (folder / "r.py").write_text(textwrap.dedent(source))
    grader = await open_grader(spec, base=folder, **options)
    try:
        yield grader
    finally:
        await grader.close()


async def failing(grader: Grader, request: GradeRequest) -> RewardFailed:
    with pytest.raises(RewardFailed) as error:
        await grader.grade(request)
    return error.value


async def outcomes(grader: Grader, completions: list[str]) -> list[Any]:
    """Reward, or the reason of the failure, of each completion, all in flight at once."""
    done = await asyncio.gather(*(grader.grade(asked(text)) for text in completions), return_exceptions=True)
    return [result.reason if isinstance(result, RewardFailed) else result.reward for result in done]


def is_alive(pid: float) -> bool:
    """Whether the process runs; one that has ended may still wait for its parent to notice."""
    stat = Path(f"/proc/{int(pid)}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


def ends(pid: int) -> bool:
    """Wait for the end of a process that is nobody's child here."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(process):
        return bool(select.select([process], [], [], 30)[0])


def take_text(text: str, /, label: str) -> tuple[str, str]:
    return text, label


# Calling a user's function


@pytest.mark.parametrize(
    ("function", "reward"),
    [
        (lambda completion: completion, "hello"),
        (lambda completion, label: (completion, label), ("hello", "bye")),
        (lambda *, metadata, trajectory_id, prompt: (metadata, trajectory_id, prompt), ({"x": 3}, "t1", "p")),
        (lambda **everything: len(everything), 5),
        (lambda completion, *rest, strict=True: (completion, rest, strict), ("hello", (), True)),
        (take_text, ("hello", "bye")),
        (len, 5),
    ],
)
def test_a_function_gets_what_it_names(function, reward):
    request = asked("hello", "bye", metadata={"x": 3}, trajectory_id="t1")

    assert read_signature(function).call(function, request) == reward


async def test_whatever_is_a_finite_number_is_a_reward(tmp_path):
    source = "import fractions, numpy\ndef reward(completion): return eval(completion)\n"
    texts = ["1", "True", "-0.5", "fractions.Fraction(1, 4)", "numpy.float32(0.5)", "numpy.bool_(True)"]
    async with grading(tmp_path, source) as grader:
        assert await outcomes(grader, texts) == [1.0, 1.0, -0.5, 0.25, 0.5, 1.0]


async def test_a_dict_is_a_reward_with_metrics(tmp_path):
    async with grading(tmp_path, "def reward(completion): return {'reward': 1, 'length': 4, 'ok': True}") as grader:
        assert await grader.grade(asked()) == GradeResult(1.0, {"length": 4.0, "ok": 1.0})


async def test_an_object_with_an_async_call_is_an_async_function(tmp_path):
    source = """
    class Judge:
        async def __call__(self, completion):
            return 3
    reward = Judge()
    """
    async with grading(tmp_path, source) as grader:
        assert (await grader.grade(asked())).reward == 3.0


async def test_calls_of_an_async_function_run_at_once(tmp_path):
    source = """
    import asyncio
    waiting, all_here = [], asyncio.Event()
    async def reward(completion):
        waiting.append(completion)
        if len(waiting) == 20:
            all_here.set()
        await all_here.wait()
        return 1.0
    """
    async with grading(tmp_path, source) as grader:
        assert await outcomes(grader, ["x"] * 20) == [1.0] * 20


async def test_the_shipped_reward_grades_the_share_of_right_letters():
    grader = await open_grader("my_reward.py:reward", base=EXAMPLES)
    try:
        assert await grader.grade(asked("cba", "cba")) == GradeResult(1.0, {"solved": 1.0})
        assert await grader.grade(asked("cxa\n", "cba")) == GradeResult(2 / 3, {"solved": 0.0})
        assert await grader.grade(asked("", "cba")) == GradeResult(0.0, {"solved": 0.0})
    finally:
        await grader.close()


# A function that cannot be used


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def other(): ...", "r.py has no function 'reward'; it has other"),
        ("import no_such_package", "No module named 'no_such_package'"),
        ("def reward(completion, answer): ...", "asks for 'answer'; it may name completion, prompt, label, metadata"),
        ("def reward(a, b, /): ...", "asks for 'b'"),
        ("import os; os._exit(3)", "its process ended at loading: exit code 3"),
        ("raise SystemExit(4)", "its process ended at loading: exit code 4"),
    ],
)
async def test_a_function_that_cannot_be_used_stops_the_start(tmp_path, source, message):
    with pytest.raises(FunctionError, match=message):
        async with grading(tmp_path, source, workers=2):
            pass


# Failures of one call


async def test_an_exception_fails_the_call_with_the_end_of_the_users_traceback(tmp_path):
    source = """
    def inner(text):
        return {}[text]
    def reward(completion):
        return inner(completion)
    """
    async with grading(tmp_path, source) as grader:
        failed = await failing(grader, asked("no_such_key"))

    assert failed.reason == "raised"
    assert failed.detail.endswith("KeyError: 'no_such_key'")
    assert 'r.py", line 5, in reward' in failed.detail
    assert "child.py" not in failed.detail


async def test_an_exception_of_an_async_function_shows_the_users_traceback(tmp_path):
    async with grading(tmp_path, "async def reward(completion):\n    raise TimeoutError('mine')\n") as grader:
        failed = await failing(grader, asked())

    assert failed.reason == "raised"
    assert failed.detail.endswith("TimeoutError: mine")
    assert "child.py" not in failed.detail


async def test_what_is_no_finite_number_fails_the_call(tmp_path):
    async with grading(tmp_path, "def reward(completion): return eval(completion)") as grader:
        for value, found in [
            ("float('nan')", "returned nan"),
            ("float('-inf')", "returned -inf"),
            ("1e31", "expected a number from -1e+30 to 1e+30"),
            ("None", "returned None"),
            ("'1.0'", "returned '1.0'"),
            ("[1.0]", "returned [1.0]"),
            ("10**400", "returned 1000"),
            ("1j", "returned 1j"),
            ("{'score': 1}", "returned no 'reward' but 'score'"),
            ("{'reward': None}", "'reward' is None"),
            ("{'reward': 1, 'note': 'good'}", "'note' is 'good'"),
            ("{'reward': 1, 'length': float('nan')}", "'length' is nan"),
        ]:
            failed = await failing(grader, asked(value))
            assert failed.reason == "value"
            assert found in failed.detail


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
SYNC, ASYNC = NAUGHTY.format(kind=""), NAUGHTY.format(kind="async ")


@pytest.mark.parametrize("source", [SYNC, ASYNC], ids=["sync", "async"])
async def test_a_hanging_call_is_killed_at_its_limit_and_the_next_gets_another_process(tmp_path, source):
    async with grading(tmp_path, source, time_limit_s=0.3) as grader:
        first = (await grader.grade(asked("pid"))).reward
        failed = await failing(grader, asked("hang"))
        second = (await grader.grade(asked("pid"))).reward

        assert failed.reason == "time_limit"
        assert failed.detail == "no reward within 0.3 s; the function's process was killed"
        assert first != second
        assert not is_alive(first)


@pytest.mark.parametrize("source", [SYNC, ASYNC], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("how", "exit_shown"), [("exit", "exit code 7"), ("sysexit", "exit code 8"), ("segfault", "killed by SIGSEGV")]
)
async def test_a_call_that_ends_its_process_says_how_and_the_next_gets_another(tmp_path, source, how, exit_shown):
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

    async with grading(tmp_path, source, workers=workers, time_limit_s=0.3) as grader:
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
    source = "import time\ndef reward(completion):\n    time.sleep(0.05)\n    return 1.0\n"
    async with grading(tmp_path, source, time_limit_s=0.5) as grader:
        assert await outcomes(grader, ["x"] * 12) == [1.0] * 12  # the last waits longer than its limit


async def test_an_async_call_past_its_limit_is_cancelled_and_its_process_kept(tmp_path):
    source = """
    import asyncio, os
    async def reward(completion):
        if completion == "sleep":
            await asyncio.Event().wait()
        return os.getpid()
    """
    async with grading(tmp_path, source, time_limit_s=0.2) as grader:
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


PARENT = """
import asyncio, os, signal
from pathlib import Path
from asyncrl.tasks.rewards import GradeRequest, open_grader

async def main():
    grader = await open_grader("r.py:reward", base=Path.cwd())
    result = await grader.grade(GradeRequest("hello", "p"))
    print(int(result.reward), flush=True)
    if {dies}:
        os.kill(os.getpid(), signal.SIGKILL)
    await grader.close()

asyncio.run(main())
"""


def run_parent(folder: Path, source: str, *, dies: bool) -> subprocess.CompletedProcess[str]:
    (folder / "r.py").write_text(textwrap.dedent(source))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-c", PARENT.format(dies=dies)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )


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
