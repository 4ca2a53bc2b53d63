"""Stages of the data: whose turn it is and which row, against a loop written from the rule; and what is checked."""

import pytest

from asyncrl.config.load import load_config
from asyncrl.config.tasks import Mixture, group_size_of, largest_group, turns
from harness.configs import SOUND, problems, the_problem

STAGES = """
[tasks.words]
source = "reverse"
share = 2
[tasks.sums]
source = "sum"
group_size = 4
[stages.even]
shares = { words = 1 }
[stages.sums-alone]
shares = { words = 0, sums = 3 }
group_size = 16
temperature = 0.7
[stages.first]
"""
BEGUN = [(5, "even"), (5, "sums-alone"), (9, "first"), (17, "even")]


def placed(shares_by_stage, base, begun, count):
    """Task and row of each prompt, one after the other: the next row of the task whose turn it is."""
    cycle, rows, found = turns(base), [0] * len(base), []
    where = {}  # place of a row in the order without stages
    for place in range(400):
        part = cycle[place % len(cycle)]
        where[part, rows[part]] = place
        rows[part] += 1
    rows, order, at = [0] * len(base), cycle, 0
    for number in range(count):
        for first, name in begun:
            if first == number:
                order, at = turns(shares_by_stage[name]), 0
        part = order[at % len(order)]
        found.append((part, where[part, rows[part]]))
        rows[part] += 1
        at += 1
    return found


def test_each_task_goes_on_with_its_next_row_whatever_the_shares_are(written):
    mixture = Mixture(load_config(written(SOUND + STAGES)).config)
    shares = {"even": [1, 1], "sums-alone": [0, 3], "first": [2, 1]}

    expected = placed(shares, [2, 1], BEGUN, 60)

    names = ["words", "sums"]
    found = [(names.index(mixture.task(n, BEGUN).name), mixture.place(n, BEGUN)) for n in range(60)]
    assert found == expected
    assert len({place for _, place in found}) == 60
    assert {names[part] for part, _ in expected[5:9]} == {"sums"}
    assert [mixture.place(number) for number in range(9)] == [*range(9)]


def test_a_stage_gives_all_tasks_its_group_size_and_temperature(written):
    config = load_config(written(SOUND + STAGES)).config
    mixture = Mixture(config)

    rules = [(task.group_size, task.temperature) for task in (mixture.task(number, BEGUN) for number in (0, 2, 5, 9))]

    assert rules == [(8, 1.0), (4, 1.0), (16, 0.7), (8, 1.0)]
    assert largest_group(config) == 16
    assert [group_size_of(config, "p000005", begun) for begun in ((), BEGUN)] == [4, 16]


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("[stages.a]\nshares = { wrods = 1 }", "stages.a.shares.wrods", "is no task: [tasks] names words, sums"),
        ("[stages.a]\nshares = { words = 0, sums = 0 }", "stages.a.shares", "leaves no task a share"),
        ("[stages.a]\nshares = { words = -1 }", "stages.a.shares", "expected table of integers >= 0 and <= 1000"),
        ("[stages.A]\n", "stages.A", 'found the name "A", expected a letter'),
        ("[stages.a]\nsteps = 1", "stages.a.steps", "unknown"),
        ("[stages.a]\ntemperature = 0.0", "stages.a.temperature", "a greedy policy"),
        ("[stages.a]\nloss = 'pqo'", "stages.a.loss", "did you mean"),
        ("[stages.a]\nloss_options = { clip = 1.0 }", "stages.a.loss_options.clip", "has no option"),
        (
            "[stages.a]\nloss = 'ppo'\nloss_options = { correction = 'mask' }",
            "stages.a.loss_options.correction",
            '"ppo"',
        ),
        ("[stages.a]\nadvantage = 'zero'", "stages.a.advantage", "leaves advantages to a teacher"),
        ("[stages.a]\nfilters = ['zero_variance']\ngroup_size = 1", "stages.a.filters", "has no variance"),
        ("[stages.a]\nat_step = 3\nat_accuracy = 0.5", "stages.a.at_step", "two conditions"),
        ("[stages.a]\nat_step = 9\n[stages.b]\nat_step = 5", "stages.b.at_step", "stage a before it at batch 9"),
        (
            "[stages.a]\nat_step = 100",
            "stages.a.at_step",
            "stages.a.at_step = 100 is not before the last batch",
        ),
        ("[stages.a]\naccuracy_groups = 3", "stages.a.accuracy_groups", "no effect without at_accuracy"),
        ("[start]\nstages = { 4 = 'gone' }", "start.stages", "forked after its stage gone; keep [stages.gone]"),
    ],
)
def test_stages_are_checked(written, text, key, message):
    problem = problems(written(SOUND + STAGES + text + "\n"))[0]

    assert problem.key == key
    assert message in problem.message


def test_a_group_of_a_stage_fits_the_slots(written):
    text = SOUND + STAGES + "[stages.a]\ngroup_size = 999\n"
    problem = problems(written(text), "rollout.slots=256")[0]

    assert problem.key == "--set rollout.slots"
    assert "a group of 999" in problem.message


def test_shares_need_named_tasks(written):
    problem = the_problem(written(SOUND + "[stages.a]\nshares = { words = 1 }\n"))

    assert (problem.key, problem.message) == ("stages.a.shares.words", "is no task: no [tasks.NAME] names any")
