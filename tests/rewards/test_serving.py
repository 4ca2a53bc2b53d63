from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from asyncrl.errors import FunctionError
from asyncrl.rewards.graders import GradeResult, open_grader
from asyncrl.rewards.serving import read_signature
from harness.child_graders import asked, failing, grading, outcomes

EXAMPLES = Path(__file__).parents[2] / "asyncrl" / "examples"


def take_text(text: str, /, label: str) -> tuple[str, str]:
    return text, label


# Calling a user's function


@pytest.mark.parametrize(
    ("function", "reward"),
    [
        (lambda completion: completion, "hello"),
        (lambda completion, label: (completion, label), ("hello", "bye")),
        (lambda *, metadata, trajectory_id, prompt: (metadata, trajectory_id, prompt), ({"x": 3}, "t1", "p")),
        (lambda **everything: len(everything), 6),
        (lambda completion, *rest, strict=True: (completion, rest, strict), ("hello", (), True)),
        (take_text, ("hello", "bye")),
        (len, 5),
    ],
)
def test_a_function_gets_what_it_names(function, reward):
    request = asked("hello", "bye", metadata={"x": 3}, trajectory_id="t1")

    assert read_signature(function).call(function, msgspec.to_builtins(request)) == reward


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
        ("raise SystemExit(4)", "SystemExit: 4"),
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
