"""Instruction following, by completions with exact scores."""

import importlib.util
import sys
from pathlib import Path

import pytest

from asyncrl.child_pool.frames import CallFailed
from asyncrl.rewards.graders import GradeRequest, open_grader
from asyncrl.rewards.instructions import make_instructions

CHECKS = pytest.mark.skipif(
    None in map(importlib.util.find_spec, ("lighteval", "syllapy", "en_core_web_sm")),
    reason="lighteval, which has the checks, or what it needs (docs/guides/write-a-reward.md) is not installed",
)


def row(*instructions: tuple[str, dict[str, object]]) -> dict[str, object]:
    return {
        "instruction_id_list": [name for name, _ in instructions],
        "kwargs": [arguments for _, arguments in instructions],
    }


NUMBERS, SPACELESS = ("count:numbers", {"N": 2, "keyword": None}), ("format:no_whitespace", {})
TWICE = ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."})


@CHECKS
@pytest.mark.parametrize(
    ("benchmark", "completion", "metadata", "reward", "followed"),
    [
        ("ifbench", "1 and 2", row(NUMBERS), 1.0, 1.0),
        ("ifbench", "1 and two", row(NUMBERS), 0.0, 0.0),
        ("ifbench", "1 and 2", row(NUMBERS, SPACELESS), 0.0, 0.5),
        ("ifbench", "1and2", row(NUMBERS, SPACELESS), 1.0, 1.0),
        ("ifbench", "3 4 5 </think>1and2", row(NUMBERS, SPACELESS), 1.0, 1.0),
        ("ifbench", " ", row(SPACELESS), 0.0, 0.0),
        ("ifeval", "Say it. It is said.", row(TWICE), 1.0, 1.0),
        ("ifeval", "It is said.", row(TWICE), 0.0, 0.0),
    ],
)
async def test_all_instructions_are_to_be_followed(benchmark, completion, metadata, reward, followed):
    grader = await open_grader(benchmark, base=Path())
    messages = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "?"}]
    try:
        result = await grader.grade(GradeRequest(completion, messages, None, metadata))
    finally:
        await grader.close()

    assert (result.reward, result.metrics) == (reward, {"followed": followed})


@CHECKS
@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "instruction_id_list = None and kwargs = None; expected two lists of the same length"),
        (row(), "expected two lists of the same length, not empty"),
        ({"instruction_id_list": ["count:numbers"], "kwargs": []}, "expected two lists of the same length"),
        (row(("format:none", {})), "instruction 'format:none' is no check of ifbench; it has count:word_count_range"),
    ],
)
async def test_rows_without_instructions_are_named(metadata, message):
    grader = await open_grader("ifbench", base=Path())
    try:
        with pytest.raises(CallFailed, match=message):
            await grader.grade(GradeRequest("x", "?", None, metadata))
    finally:
        await grader.close()


def test_without_the_package_the_reward_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lighteval", None)
    with pytest.raises(Exception, match=r"'ifbench' needs the package lighteval\S*, which is not installed; docs"):
        make_instructions("ifbench")
