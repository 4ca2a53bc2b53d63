"""Several tasks in one config: what each takes from the whole, what is checked of each, and whose turn it is."""

import msgspec
import pytest

from asyncrl.cli.main import run
from asyncrl.config.load import load_config, with_overrides
from asyncrl.config.settings import Config
from asyncrl.config.tasks import Mixture, group_size_of, largest_group, tasks_of, turns
from harness.configs import SOUND, problems, the_problem

TWO = """
rollout.temperature = 0.9
reward.function = "math"
[tasks.words]
source = "reverse"
options = { letters = 3 }
share = 2
[tasks.sums]
source = "sum"
reward = "exact"
group_size = 4
temperature = 1.5
advantage = "centered"
"""


def test_a_task_takes_what_it_leaves_out_from_the_settings_of_one_task(written):
    config = load_config(written(SOUND + TWO)).config

    words, sums = tasks_of(config).values()
    assert (words.name, words.source, words.options, words.share) == ("words", "reverse", {"letters": 3}, 2)
    assert (words.rollout, words.reward, words.group_size, words.temperature) == ("single_turn", "math", 8, 0.9)
    assert (sums.options, sums.share, sums.reward, sums.group_size) == ({}, 1, "exact", 4)
    assert (sums.temperature, sums.advantage, words.advantage) == (1.5, "centered", "grpo")
    assert (largest_group(config), group_size_of(config, "p000002"), group_size_of(config, "p000003")) == (8, 4, 8)
    assert group_size_of(config, "r000002") == 8
    assert with_overrides(config, []) == msgspec.convert(msgspec.to_builtins(config), Config) == config


def test_a_run_of_one_task_has_one_that_is_called_task():
    (task,) = tasks_of(Config()).values()

    assert (task.name, task.source, task.reward, task.share) == ("task", "reverse", "exact", 1)


def test_an_override_of_a_task_is_read_as_its_setting_is(written):
    overrides = ["tasks.sums.share=3", "tasks.sums.rollout=7", "tasks.more.source=~/rows.jsonl"]

    tasks = tasks_of(load_config(written(SOUND + TWO), overrides=overrides).config)

    assert (tasks["sums"].share, tasks["sums"].rollout) == (3, "7")
    assert tasks["more"].source.startswith("/")


@pytest.mark.parametrize(
    ("shares", "order"),
    [([1], [0]), ([2, 1], [0, 0, 1]), ([1, 1], [0, 1]), ([3, 2], [0, 1, 0, 0, 1]), ([1, 3], [1, 1, 0, 1])],
)
def test_the_next_prompt_is_of_the_task_with_the_fewest_by_its_share(shares, order):
    assert turns(shares) == order


def test_the_task_of_a_prompt_follows_from_its_number_alone(written):
    mixture = Mixture(load_config(written(SOUND + TWO)).config)

    assert [mixture.task(number).name for number in (0, 1, 2, 3, 3_000_000, 3_000_002)] == [
        *("words", "words", "sums", "words"),
        *("words", "sums"),
    ]


@pytest.mark.parametrize(
    ("text", "key", "line", "message"),
    [
        ("[tasks.a]\nsource = 'sum'\nshare = 0", "tasks.a.share", 4, "expected integer >= 1 and <= 1000"),
        ("[tasks.a]\nsource = 'sum'\ngroup_size = 1", "tasks.a.group_size", 4, 'set tasks.a.advantage = "none"'),
        ("[tasks.a]\nsource = 'sum'\ntemperature = 0.0", "tasks.a.temperature", 4, "a greedy policy"),
        (
            "rollout.slots = 256\n[tasks.a]\nsource = 'sum'\ngroup_size = 999",
            "tasks.a.group_size",
            5,
            "rollout.workers * rollout.slots",
        ),
        (
            "[tasks.a]\nsource = 'sum'\nreward = ''",
            "tasks.a.reward",
            4,
            'names no reward and tasks.a.rollout = "single_',
        ),
        ("[tasks.a]\nsource = 'sum'\neval_source = 'sum'", "tasks.a.eval_source", 4, "eval.prompts = 0"),
        ("[tasks.a]\nsource = 'sum'\nsorce = 'sum'", "tasks.a.sorce", 4, "did you mean tasks.a.source?"),
        ("[tasks.a]\nshare = 2", "tasks.a", 2, "names no data; set tasks.a.source"),
        ("[tasks.warmup]\nsource = 'sum'", "tasks.warmup", 2, 'found the name "warmup", expected a letter'),
        ("[tasks]\na = 3", "tasks.a", 3, "expected table of settings, [tasks.a]"),
        (
            "task.epochs = 2\n[tasks.a]\nsource = 'sum'",
            "task.epochs",
            2,
            "is for a run of one task, and [tasks] names a",
        ),
    ],
)
def test_each_task_is_checked_at_its_lines(written, text, key, line, message):
    problem = the_problem(written(SOUND + text + "\n"))

    assert (problem.key, problem.line) == (key, line)
    assert message in problem.message


def test_check_looks_at_the_data_and_functions_of_each_task(written, tmp_path, capsys):
    (tmp_path / "rewards.py").write_text("def reward(completion: str) -> float:\n    return 1.0\n")
    sound = SOUND + TWO.replace("math", "exact")
    path = written(sound + "[tasks.mine]\nsource = 'none.jsonl'\nrollout = 'none.py:f'\nreward = 'rewards.py:g'\n")

    found = {problem.key: problem.message for problem in problems(path, files=True)}

    assert found.keys() == {"tasks.mine.source", "tasks.mine.rollout", "tasks.mine.reward"}
    assert "no such file" in found["tasks.mine.source"]
    path = written(sound + "[tasks.mine]\nsource = 'sum'\nreward = 'rewards.py:reward'\n")
    assert run(["check", str(path)]) == 0, capsys.readouterr()
