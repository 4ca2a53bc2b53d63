"""Rewards that find an answer, by completions with exact scores."""

from pathlib import Path

import pytest

from asyncrl.rewards.answers import dapo, f1, gpqa, last_boxed, last_number, make_boxed, make_deepscaler
from asyncrl.rewards.graders import GradeRequest, open_grader


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        ("so \\boxed{42}", "42"),
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\fbox{x}", "x"),
        ("\\boxed{never {ends}", None),
        ("boxed{1}", None),
    ],
)
def test_the_last_boxed_answer(text, boxed):
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("completion", "label", "reward"),
    [
        ("12 + 34 = 46.", "46", 1.0),
        ("1,234", 1234, 1.0),
        ("-5", "-5", 1.0),
        ("46 is not 47", "46", 0.0),
        ("146", "46", 0.0),
        ("forty-six", "46", 0.0),
    ],
)
def test_last_number(completion, label, reward):
    assert last_number(completion, label) == reward


@pytest.mark.parametrize(
    ("completion", "label", "reward"),
    [
        ("<think>hm</think> It is \\boxed{42}.", "42", 1.0),
        ("hm ###Response It is \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("<think>hm</think> \\boxed{42}", "\\boxed{42}", 1.0),
        ("<think>hm</think> \\boxed{41}", 42, 0.0),
        ("\\boxed{42}", "42", 0.0),  # the thinking never ended
        ("<think>\\boxed{42}</think> forty-two", "42", 0.0),  # boxed in the thinking alone
    ],
)
def test_deepscaler(completion, label, reward):
    assert make_deepscaler()(completion, label) == reward


@pytest.mark.parametrize(
    ("completion", "label", "right"),
    [
        ("First ... Answer: 34", "34", True),
        ("answer : $1,234$", 1234, True),
        ("Answer: 34.0", "34", True),
        ("Answer: \\boxed{7}", "7", True),
        ("Answer: 12 \\text{ cm}", "12", True),
        ("Answer: 33\nAnswer: 34", "34", True),  # the last counts
        ("Answer: 34\nAnswer: 33", "34", False),
        ("The answer is 34", "34", False),
        ("Answer: 34" + " " * 300, "34", False),  # beyond the last 300 characters
        ("Answer: -3", "3", False),
        ("Answer: \\frac{1}{2}", "\\frac{1}{2}", True),
        ("Answer: n = 34", "34", True),
        ("Answer: 34 degrees", "34", True),
        ("Answer: $34^\\circ$", "34", True),
        ("Answer: 34 or 35", "34", False),
        ("Answer: feet", "minutes", False),
        ("Answer: x <= 5", "x >= 5", False),
    ],
)
def test_dapo(completion, label, right):
    assert dapo(completion, label) == {"reward": 1.0 if right else -1.0, "acc": float(right)}


@pytest.mark.parametrize(
    ("completion", "label", "expected"),
    [
        ("The Eiffel Tower", "eiffel tower!", (1.0, 1.0, 1.0)),
        ("in Paris, France", "Paris", (0.5, 1 / 3, 1.0)),
        ("a cat", "dog", (0.0, 0.0, 0.0)),
        ("yes", "Yes.", (1.0, 1.0, 1.0)),
        ("yes it is", "yes", (0.0, 0.0, 0.0)),  # whole answers only
        ("no", "no one", (0.0, 0.0, 0.0)),
        ("", "x", (0.0, 0.0, 0.0)),
        ("red red blue", "red blue blue", (2 / 3, 2 / 3, 2 / 3)),
    ],
)
def test_f1(completion, label, expected):
    assert tuple(f1(completion, label).values()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("completion", "label", "metadata", "reward"),
    [
        ("The final answer is B", "B", None, 1.0),
        ("Answer: (C)", "C", None, 1.0),
        ("**Answer: D**", 3, None, 1.0),
        ("I think A, but B is correct", "B", None, 1.0),
        ("The option is A. The final answer is: **B**", "A", None, 0.0),
        ("A? No: C", "C", None, 1.0),
        ("<think>Answer: A</think> Answer: B", "B", None, 1.0),
        ("Answer: E", "A", None, 0.0),  # A to D where nothing else is said
        ("Answer: E", "E", {"valid_letters": ["A", "E"]}, 1.0),
        ("Answer: B", "blue", {"choices": ["red", "blue"]}, 1.0),
        ("Answer: B", "red", {"choices": ["red", "blue"], "correct_letter": "B"}, 1.0),
        ("no letter at all", "A", None, 0.0),
        ("Answer: F", "F", None, 1.0),  # A to J, since the label is beyond D
        ("Answer: F", 4, None, 0.0),
        ("It is the light  blue!", "Light blue", {"choices": ["red", "light blue"]}, 1.0),
        ("It is bluer than red.", "light blue", {"choices": ["red", "light blue"]}, 0.0),
        ("red or light blue", "red", {"choices": ["red", "light blue"]}, 0.0),  # who names all chooses none
        ("it is -5", "A", {"choices": ["5", "-5"]}, 0.0),
        ("it is -5.", "B", {"choices": ["5", "-5"]}, 1.0),
        ("B", "x - 1", {"choices": ["x+1", "x-1"]}, 1.0),
        ("B\nI am sure", "(B)", None, 1.0),  # A to D
    ],
)
def test_gpqa(completion, label, metadata, reward):
    assert gpqa(completion, label, metadata) == reward


@pytest.mark.parametrize(
    ("reward", "completion", "label", "expected"),
    [
        ("math", "\\boxed{41}, no: \\boxed{\\frac{84}{2}}", "42", 1.0),
        ("math", "It is 42", "42", 0.0),
        ("f1", "Paris? \\boxed{in Rome}", "Rome", {"reward": 2 / 3, "precision": 0.5, "recall": 1.0}),
        ("f1", "Rome", "Rome", {"reward": 0.0, "precision": 0.0, "recall": 0.0}),
        ("gpqa", "A is correct: \\boxed{\\text{B}}", "B", 1.0),
        ("gpqa", "B is correct", "B", 0.0),
    ],
)
def test_a_boxed_reward_sees_the_last_boxed_answer_alone(reward, completion, label, expected):
    assert make_boxed(reward)(completion, label) == pytest.approx(expected)


def test_a_label_that_is_no_choice_is_refused():
    with pytest.raises(ValueError, match="label 'green' is no choice: letters are A, B"):
        gpqa("Answer: A", "green", {"choices": ["red", "blue"]})


async def test_the_reward_by_chance_needs_no_label_and_is_either():
    grader = await open_grader("random", base=Path())
    found = {(await grader.grade(GradeRequest("abc", "?", None))).reward for _ in range(200)}
    await grader.close()

    assert found == {0.0, 1.0}


async def test_they_are_rewards_by_their_names():
    found = {}
    for name, completion in {
        "deepscaler": "</think>\\boxed{7}",
        "dapo": "Answer: 7",
        "f1": "7",
        "gpqa": "B",
        "boxed_f1": "\\boxed{7}",
    }.items():
        grader = await open_grader(name, base=Path())
        result = await grader.grade(GradeRequest(completion, "?", "B" if name == "gpqa" else "7"))
        await grader.close()
        found[name] = (result.reward, sorted(result.metrics))

    assert found == {
        "deepscaler": (1.0, []),
        "dapo": (1.0, ["acc"]),
        "f1": (1.0, ["precision", "recall"]),
        "gpqa": (1.0, []),
        "boxed_f1": (1.0, ["precision", "recall"]),
    }
