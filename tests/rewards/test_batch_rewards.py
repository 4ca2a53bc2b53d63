"""Rewards that grade many completions by one call."""

import asyncio
from pathlib import Path

import pytest

from asyncrl.rewards.graders import open_grader
from harness.child_graders import asked, grading, outcomes

COUNTS = """
    def reward(completion, label):
        assert isinstance(completion, list) and isinstance(label, list)
        return [{"reward": float(text), "together": len(completion)} for text in completion]
    """


async def test_one_call_grades_as_many_as_wait_and_each_gets_its_own_score(tmp_path):
    async with grading(tmp_path, COUNTS, batch=4) as grader:
        results = await asyncio.gather(*(grader.grade(asked(str(number))) for number in range(10)))

    assert [result.reward for result in results] == list(range(10))
    assert [result.metrics["together"] for result in results] == [4] * 8 + [2] * 2  # the last two waited for no more


async def test_a_function_may_be_async_and_take_the_completions_alone(tmp_path):
    source = "async def reward(texts, /):\n    return (len(text) for text in texts)\n"
    async with grading(tmp_path, source, batch=8) as grader:
        assert await outcomes(grader, ["a", "", "abc"]) == [1, 0, 3]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("raise ValueError", "raised"),
        ("os._exit(3)", "exited"),
        ("time.sleep(60)", "time_limit"),
        ("x = bytearray(10**9)", "memory"),
        ("return []", "value"),
    ],
)
async def test_a_call_that_fails_is_repeated_one_by_one_and_fails_those_that_are_to_blame(tmp_path, line, reason):
    source = f"""
        import os, time
        def reward(completion):
            if "bad" in completion:
                {line}
            return [1.0] * len(completion)
        """
    async with grading(tmp_path, source, batch=4, time_limit_s=2, memory_mb=500) as grader:
        assert await outcomes(grader, ["good", "bad", "good", "good"]) == [1.0, reason, 1.0, 1.0]


async def test_a_score_that_is_no_number_fails_its_own_completion_alone(tmp_path):
    source = "def reward(completion):\n    return [1.0, float('nan'), 'x', {'reward': 2}, {}]\n"
    async with grading(tmp_path, source, batch=5) as grader:
        assert await outcomes(grader, list("abcde")) == [1.0, "value", "value", 2.0, "value"]


@pytest.mark.parametrize("answer", ["1.0", "'yes'", "None", "{'reward': 1.0}"])
async def test_what_is_no_list_fails_with_what_was_expected(tmp_path, answer):
    async with grading(tmp_path, f"def reward(completion):\n    return {answer}\n", batch=2) as grader:
        done = await asyncio.gather(*(grader.grade(asked(text)) for text in "ab"), return_exceptions=True)

    assert all("expected a list, one score for each completion" in str(error) for error in done)


async def test_whoever_is_gone_touches_no_other_and_closing_fails_those_that_wait(tmp_path):
    source = """
        import asyncio
        async def reward(completion):
            if "slow" in completion:
                await asyncio.sleep(60)
            return [1.0] * len(completion)
        """
    async with grading(tmp_path, source, batch=2) as grader:
        gone = asyncio.create_task(grader.grade(asked("gone")))
        await asyncio.sleep(0)
        gone.cancel()
        assert await outcomes(grader, ["stays"]) == [1.0]
        waiting = asyncio.create_task(outcomes(grader, ["slow", "slow"]))
        await asyncio.sleep(0)
    assert await waiting == ["closed", "closed"]


async def test_graders_of_asyncrl_take_one_at_a_time_as_ever():
    grader = await open_grader("f1", base=Path(), batch=8)
    try:
        assert (await grader.grade(asked("a word", label="a word"))).reward == 1.0
    finally:
        await grader.close()
