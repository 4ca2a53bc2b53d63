"""Texts about a run: its summary, errors and evaluations."""

import pytest

from actors.recorder.fold import RecorderFold
from asyncrl.state.records import evaluation_text, one_line
from asyncrl.state.summary import summary_text
from topics.evals import EvalScored


@pytest.mark.parametrize(
    ("warmup_steps", "steps"),
    [(0, "the run ended before its first step"), (7, "the run ended after 7 steps of warm-up")],
)
def test_the_summary_of_a_run_without_steps_says_so_and_has_no_empty_figures(warmup_steps: int, steps: str):
    summary = RecorderFold().summary("demo", []) | {"warmup_steps": warmup_steps, "metrics": "m"}

    rows = dict(line.strip().split("  ", 1) for line in summary_text(summary).splitlines())

    assert list(rows) == ["steps", "wall time", "metrics", "model"]
    assert rows["steps"] == f"none of RL: {steps}"


def test_the_figures_of_a_summary_stand_below_each_other_however_long_a_name_is():
    reports = {"accuracy, arithmetic": "0.5"}
    summary = RecorderFold().summary("demo", []) | {"metrics": "m", "reports": reports}

    lines = summary_text(summary).splitlines()

    assert {line[20:22] for line in lines} == {"  "} and len({line[:20] for line in lines}) == len(lines)
    assert all(line[19] != " " and line[22] != " " for line in lines)


def test_a_traceback_is_shown_by_its_last_line():
    text = (
        "p000237-5 reward: raised: Traceback (most recent call last):\n  File 'judge.py', line 3\nRuntimeError: no z\n"
    )

    assert one_line(text, "explain p000237-5") == (
        "p000237-5 reward: raised: RuntimeError: no z (more: asyncrl explain p000237-5)"
    )


@pytest.mark.parametrize(
    ("versions", "failed", "end"),
    [
        ({0: 9}, 0, "on 16 prompts"),
        ({0: 9}, 2, "on 16 prompts, 2 without a grade"),
        ({0: 10, 1: 30}, 0, "on 16 prompts, 75 % of it by version 1"),
        ({0: 10, 1: 20, 2: 10}, 0, "on 16 prompts, 75 % of it by versions 1 and 2"),
    ],
)
def test_an_evaluation_names_the_versions_that_answered_in_place_of_its_own(versions, failed, end):
    assert evaluation_text(EvalScored("e000000", 0, versions, 0.25, 16, failed, 0.1)) == (
        f"evaluation of version 0: 0.250 {end}"
    )
