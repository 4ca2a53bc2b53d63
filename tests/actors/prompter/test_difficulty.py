"""The difficulty of prompts in the prompter's fold: it follows from the log of batches alone."""

from pathlib import Path

import pytest

from actors.prompter.actor import decide, sampling_seed
from actors.prompter.data_order import DataOrder
from actors.prompter.fold import Wanted
from asyncrl.data.curriculum import Climb, level_of
from asyncrl.state.audit.ledger import Ledger
from harness.prompter_feed import config, feed, issue
from topics.actors import ReissueRequested
from topics.batches import BatchGroup, BatchMember, BatchPacked
from topics.groups import GroupDropped
from topics.prompts import PromptIssued, PromptRow
from topics.trajectories import Reference

RISING = {"curriculum": {"option": "letters", "first": 2, "last": 5, "groups": 1, "window": 1}}
# Batches of 2 groups with L = 1: at most 4 groups are open.


def levels(fed, count=20):
    source = fed.fold.sources["p"]
    return [level_of(source.group(fed.fold.state, number).places.start) for number in range(count)]


def test_a_rise_holds_from_the_first_prompt_that_cannot_have_been_issued():
    fed = feed(task=RISING)
    issue(fed)
    before = levels(fed)

    fed.packed(1, "p000000", "p000001")  # one answer each, which pass: a group has two answers

    assert before == [0] * 20
    assert levels(fed) == [0] * 6 + [1] * 14  # two ended, and four more may be open
    assert issue(fed) == []  # packed is not yet trained: no credit
    fed.trained(1)
    assert issue(fed) == ["p000004-0", "p000004-1", "p000005-0", "p000005-1"]
    fed.packed(2, "p000002", "p000003").trained(2)
    (first, *_) = fed.fold.wanted()
    assert (first.prompt_id, first.group.level) == ("p000006", 1)


def test_no_issued_prompt_ever_changes_its_level():
    fed = feed(task=RISING)
    seen = {}
    for step in range(1, 5):
        for item in fed.fold.wanted():
            seen[item.prompt_id] = item.group.level
        issue(fed)
        number = 2 * step - 2
        fed.packed(step, f"p{number:06d}", f"p{number + 1:06d}").trained(step)
        found = levels(fed)
        assert {name: found[int(name[1:])] for name in seen} == seen
    assert max(levels(fed)) > 0


def test_levels_do_not_depend_on_the_order_between_logs():
    first, second = feed(task=RISING), feed(task=RISING)
    issue(first)
    for fed in (first, second):
        fed.packed(1, "p000000", "p000001")
    first.trained(1)
    issue(second, count=0)

    assert levels(first) == levels(second)


def test_groups_that_a_filter_dropped_count_with_their_rewards():
    fed = feed(task=RISING)
    issue(fed)

    fed.publish(GroupDropped("p000000", "zero_variance", members=2, rewards=[1.0, 1.0]))
    assert levels(fed) == [0] * 5 + [1] * 15
    fed.publish(GroupDropped("p000001", "failed", members=2))
    assert levels(fed) == [0] * 5 + [1] * 15


def test_a_prompt_that_is_issued_again_has_the_row_of_its_level():
    fed = feed(task=RISING)
    fed.fold.state.climbs["task"] = Climb(rises=[3])
    fed.publish(ReissueRequested(prompt_id="p000002"))
    fed.publish(ReissueRequested(prompt_id="p000003"))

    groups = [item.group for item in fed.fold.wanted() if item.member == 0]

    assert [(group.origin, group.level) for group in groups[:2]] == [("p000002", 0), ("p000003", 1)]


def test_tasks_climb_alone():
    tasks = {"easy": {"source": "reverse", **RISING}, "plain": {"source": "sum"}}
    fed = feed(tasks=tasks)
    issue(fed)

    fed.packed(1, "p000000", "p000001", tasks=("easy", "plain")).trained(1)
    issue(fed)
    fed.packed(2, "p000002", "p000003", tasks=("easy", "plain"))

    assert fed.fold.state.climbs == {"easy": Climb(rises=[7])}  # p000000 and p000002; three had ended then
    assert levels(fed, 12) == [0] * 8 + [1, 0, 1, 0]


def test_an_issue_names_the_level_and_carries_it():
    group = feed(task=RISING).fold.sources["p"]
    state = feed(task=RISING).fold.state
    state.climbs["task"] = Climb(rises=[0, 0])

    issued = decide(Wanted(group.group(state, 4), 0, 0), 0, [PromptRow("x")])

    assert issued.level == 2


@pytest.mark.parametrize("before_the_answers", [True, False])
def test_the_audit_finds_a_level_that_does_not_follow_from_the_answers(before_the_answers):
    ledger = Ledger()
    order = DataOrder(ledger, config(task=RISING), Path())
    names = ("p000000", "p000001")  # one answer each, and a decision takes two
    groups = [BatchGroup(name, [BatchMember(f"{name}-0", 0, Reference(1, "", 1), 1.0, 3)]) for name in names]
    if before_the_answers:
        note_three(order)
    order._count(BatchPacked(step=1, stage="rl", min_version=0, groups=groups))
    if not before_the_answers:
        note_three(order)

    order.compare_levels()

    [wrong] = [found for found in ledger.violations if found.kind == "wrong level"]
    assert (wrong.id, wrong.found, wrong.expected) == ("p000007", "level 0", "1, by the answers before it")


def note_three(order):
    for number, level in ((5, 0), (6, 1), (7, 0)):  # two groups ended, and four more could be open
        order._note(prompt(number, level), "0" * 16)


def prompt(number, level):
    seed = sampling_seed(config().seed, f"p{number:06d}-0", 0)
    return PromptIssued(prompt_id=f"p{number:06d}", member=0, group_size=2, rows=[], stage="rl", seed=seed, level=level)
