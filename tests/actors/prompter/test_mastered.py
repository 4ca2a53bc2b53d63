"""Rows whose groups pass leave the order of the prompts, in the same way for every prompter and for the audit."""

from array import array
from pathlib import Path

import pytest

from actors.prompter.data_order import DataOrder
from actors.prompter.sources import TASK_ROWS
from asyncrl.epochs import row_at
from asyncrl.state.audit.ledger import Ledger
from harness.configs import problems
from harness.prompter_feed import config, feed, issue
from topics.groups import GroupDropped

ROWS = 3
TASK = {"source": "rows.jsonl", "mastered": {"groups": 1, "reward": 1.0, "epochs": 2}}


def opened(**tables):
    fed = feed(task=TASK, **tables)
    fed.fold.opened(TASK_ROWS, ROWS)
    return fed


def rows_of(fed, count: int) -> list[int]:
    fed.fold.record_mastered()
    source, state = fed.fold.sources["p"], fed.fold.state
    return [row_at(source.group(state, number).places.start, ROWS, config().seed) for number in range(count)]


def test_a_mastered_row_leaves_from_the_first_prompt_that_cannot_have_been_issued():
    fed, plain = opened(), opened()
    issue(fed)
    fed.publish(GroupDropped("p000000", "zero_variance", members=2, rewards=[1.0, 1.0]))
    fed.publish(GroupDropped("p000001", "zero_variance", members=2, rewards=[1.0, 0.0]))

    rows, before = rows_of(fed, 20), rows_of(plain, 20)

    leaves = 1 + 4  # one group had ended, and four may be open
    assert rows[:leaves] == before[:leaves]
    assert before[0] not in rows[leaves : leaves + 2 * ROWS]
    assert before[0] in rows[leaves + 2 * ROWS :]
    assert (fed.fold.record_mastered(), fed.fold.state.mastered.rates[before[0]]) == (0, 1.0)


def test_groups_that_are_read_before_the_data_is_open_count_too():
    early, late = feed(task=TASK), opened()
    for fed in (early, late):
        issue(fed)
        fed.publish(GroupDropped("p000000", "zero_variance", members=2, rewards=[1.0, 1.0]))
    assert early.fold.record_mastered() == 0
    early.fold.opened(TASK_ROWS, ROWS)

    assert rows_of(early, 20) == rows_of(late, 20)


def test_the_audit_expects_the_rows_that_the_prompter_issued():
    fed, order = opened(), DataOrder(Ledger(), config(task=TASK), Path())
    dropped = GroupDropped("p000000", "zero_variance", members=2, rewards=[1.0, 1.0])
    issue(fed)
    fed.publish(dropped)
    fed.fold.record_mastered()
    order._count(dropped)
    key = (TASK_ROWS, "p")
    order._numbers[key] = order._firsts[key] = array("Q", range(20))
    order._digests[key] = array("Q", [0] * 20)
    order._prompter.opened(TASK_ROWS, ROWS)
    order._prompter.record_mastered()

    expected = [fed.fold.sources["p"].group(fed.fold.state, number).places.start for number in range(20)]
    assert [one.first for one in order.carried(TASK_ROWS)] == expected != [*range(20)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("task.mastered.groups=2",), "needs a finite number of rows: reverse"),
        (("task.mastered.reward=0.5",), "has no effect: task.mastered.groups is 0"),
        (
            ("task.mastered.groups=2", "stages={hard={at_step=3}}"),
            "order of one task alone, and stages is",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: tuple[str, ...], words: str):
    assert any(words in one.message for one in problems("demo", *settings, files=True))
