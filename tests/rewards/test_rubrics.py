"""Rubrics: a judge behind a real HTTP server, asked by rewards in child processes."""

import re
from pathlib import Path

import pytest

from asyncrl.child_pool.frames import CallFailed
from asyncrl.errors import FunctionError
from asyncrl.rewards.graders import GradeRequest, GroupGrader, GroupReward, open_grader
from asyncrl.rewards.rubrics import Rubric
from harness.endpoints import Endpoint, completion

FILE = """
[judge]
url = "{url}"
model = "wise"
api_key_file = "judge.key"

[[criteria]]
text = "It is polite."
weight = 3.0
name = "polite"

[[criteria]]
text = "It is right."

[[criteria]]
text = "It shouts."
weight = -2.0
"""
OWN = """
from pathlib import Path

from asyncrl import Rubric

rubric = Rubric.read(Path(__file__).with_name("rubric.toml"))
reward, judge = rubric.grade, rubric.compare
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "judged.py").write_text(OWN)
    (tmp_path / "judge.key").write_text("sk-2\n")
    return tmp_path


def verdicts(*words):
    """Lines of the judge, after a thought that looks like one."""
    return lambda _http, mark: completion(
        "CRITERION 1: no\n" + "\n".join(f"CRITERION {mark} {n}: {word}" for n, word in enumerate(words, 1))
    )


def request(text, name="p000000-0"):
    return GradeRequest(completion=text, prompt=[{"role": "user", "content": "Greet me."}], trajectory_id=name)


async def test_the_reward_is_the_weight_of_the_criteria_that_are_met(folder):
    endpoint = Endpoint(verdicts("yes", "no", "no"), verdicts("yes", "yes", "yes"), verdicts("no", "no", "yes"))
    async with endpoint.served() as url:
        (folder / "rubric.toml").write_text(FILE.format(url=url))
        grader = await open_grader("judged.py:reward", base=folder)
        try:
            found = [await grader.grade(request("Dear friend")) for _ in range(3)]
        finally:
            await grader.close()

    assert [one.reward for one in found] == [0.75, 0.5, 0.0]  # 3 / 4, (3 + 1 - 2) / 4, and never below 0
    assert [one.metrics["polite"] for one in found] == [1.0, 1.0, 0.0]
    assert endpoint.headers[0]["Authorization"] == "Bearer sk-2"
    asked = endpoint.bodies[0]["messages"]
    assert "1. It is polite. (3)" in asked[0]["content"]
    assert "user: Greet me." in asked[1]["content"]
    assert "Dear friend" in asked[1]["content"]


async def test_an_answer_without_a_verdict_fails_the_trajectory(folder):
    endpoint = Endpoint(verdicts("yes", "no"))
    async with endpoint.served() as url:
        (folder / "rubric.toml").write_text(FILE.format(url=url))
        grader = await open_grader("judged.py:reward", base=folder)
        try:
            with pytest.raises(CallFailed, match="no answer for criterion 3"):
                await grader.grade(request("CRITERION 3: yes"))
        finally:
            await grader.close()


@pytest.mark.parametrize(("fair", "scores"), [(True, [0.0, 1.0, 0.5]), (False, [0.5, 0.5, 0.5])])
async def test_a_group_is_ranked_by_comparisons_in_both_orders(folder, fair, scores):
    endpoint = Endpoint(lambda http, mark: completion(f"BETTER {mark}: {choice(endpoint) if fair else 'first'}"))
    async with endpoint.served() as url:
        (folder / "rubric.toml").write_text(FILE.format(url=url))
        reward = GroupReward("judged.py:judge", "round_robin")
        options = {"workers": 1, "time_limit_s": 60.0, "memory_mb": 0, "most": 3}
        grader = await GroupGrader.open(reward, base=folder, **options)
        try:
            found = await grader.grade([request(text) for text in ("1 point", "3 points", "2 points")])
        finally:
            await grader.close()

    assert [one.reward for one in found] == pytest.approx(scores)
    assert len(endpoint.bodies) == 6


def choice(endpoint):
    """The answer with more points, in the newest question."""
    first, second = map(int, re.findall(r"^(\d) points?$", endpoint.bodies[-1]["messages"][1]["content"], re.MULTILINE))
    return "first" if first > second else "second"


async def test_a_function_may_be_the_judge(tmp_path):
    (tmp_path / "rubric.toml").write_text('[[criteria]]\ntext = "It is short."\n')

    async def ask(messages):
        mark = re.findall(r"CRITERION ([0-9a-f]{16})", messages[0]["content"])[0]
        return f"CRITERION {mark} 1: {'yes' if 'brief' in messages[1]['content'] else 'no'}"

    rubric = Rubric.read(tmp_path / "rubric.toml", ask)

    assert [(await rubric.grade(text, "?"))["reward"] for text in ("brief", "long")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "criteria"),
        ('[[criteria]]\ntext = "a"\n', "names no judge"),
        ('[[criteria]]\ntext = "a"\nweigth = 1.0\n', "weigth"),
        ('[judge]\nurl = "u"\nmodel = "m"\n[[criteria]]\ntext = "a"\nweight = -1.0\n', "add up to 0"),
    ],
)
def test_a_file_that_is_no_rubric_is_refused(tmp_path, text, words):
    (tmp_path / "rubric.toml").write_text(text)

    with pytest.raises(FunctionError, match=words):
        Rubric.read(tmp_path / "rubric.toml")
