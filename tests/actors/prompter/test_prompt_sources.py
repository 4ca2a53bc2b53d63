"""Prompt sources: a second source of RL is mixed in by its share, whatever the timing and however often it restarts."""

from collections import Counter
from collections.abc import Iterable
from itertools import count
from random import Random

import pytest

from actors.prompter.fold import PrompterFold
from actors.prompter.sources import SOURCES, Group, PrompterState, PromptSource
from asyncrl.config.settings import Config
from harness.folds import Feed
from harness.prompter_feed import config, feed, issue
from topics.evals import EvalRequested
from topics.ids import prompt_name, stage_of
from topics.turns import Sibling, TurnAdmitted
from topics.wire import decode, encode


class Sessions(PromptSource):
    """A source beside the task's: groups of three, for every third group of RL."""

    letter, share = "s", 0.5

    def __init__(self, ready: int | None = None) -> None:
        self.ready = ready  # sessions that there are; None: without end

    def numbers(self, state: PrompterState) -> Iterable[int]:
        return count(state.first("s")) if self.ready is None else range(state.first("s"), self.ready)

    def group(self, state: PrompterState, number: int) -> Group:
        return Group(prompt_name("s", number), "rl", ["sessions"], 3, range(0))


def admitted(number: int, **rules) -> TurnAdmitted:
    named = {"turn_id": f"t{number}", "session": "s", "tenant": "anna", "by": "user", "reward": 0.5}
    return TurnAdmitted(**named, temperature=rules.get("temperature", 1.0))


def sources(settings: Config, sessions: PromptSource) -> list[PromptSource]:
    return [*(make(settings) for make in SOURCES.values()), sessions]


def order_of_issue(fed: Feed, chance: Random, settings: Config) -> list[str]:
    """Groups as they are issued, while ends and restarts come whenever they come."""
    issued: list[str] = []
    while len(issued) < 60:
        names = issue(fed, chance.choice([None, 1, 2, 5]))
        issued += [name for name in dict.fromkeys(name.split("-")[0] for name in names) if name not in issued]
        if chance.random() < 0.3:
            before, fed.fold = fed.fold.state, PrompterFold(settings, sources(settings, Sessions()))
            fed.fold.state = decode(PrompterState, encode(before))
        for name in sorted(fed.fold.state.open["rl"] - fed.fold.state.members.keys()):
            if chance.random() < 0.5:
                fed.dropped(name)
    return issued[:60]


def test_a_second_source_is_mixed_in_by_its_share_whatever_the_timing():
    settings = config(learner={"steps": 1000})
    orders = [
        order_of_issue(Feed(PrompterFold(settings, sources(settings, Sessions()))), Random(seed), settings)
        for seed in range(6)
    ]

    assert all(order == orders[0] for order in orders)
    assert orders[0][:6] == ["p000000", "p000001", "s000000", "p000002", "p000003", "s000001"]
    assert Counter(name[0] for name in orders[0]) == {"p": 40, "s": 20}


def test_the_credit_is_shared_and_a_source_with_nothing_leaves_it_to_the_others():
    settings, sessions = config(), Sessions(ready=0)
    fed = Feed(PrompterFold(settings, sources(settings, sessions)))
    assert {name.split("-")[0] for name in issue(fed)} == {f"p{number:06d}" for number in range(4)}

    sessions.ready = 1
    assert fed.fold.wanted() == []
    fed.dropped("p000000").dropped("p000001")

    assert issue(fed) == ["s000000-0", "s000000-1", "s000000-2", "p000004-0", "p000004-1"]
    assert fed.fold.open_groups == 4


@pytest.mark.parametrize(
    ("method", "alone", "together"), [("binary", "none", "rloo"), ("combine", "combine", "combine_rloo")]
)
def test_turns_with_one_prompt_are_issued_as_one_group_and_compared(method: str, alone: str, together: str):
    fed = Feed(PrompterFold(config(live={"fraction": 1.0, "method": method})))
    pair = admitted(0)
    pair.siblings = [Sibling("t1", "s", -1.0, "judge")]
    for one in (pair, admitted(2)):
        fed.publish(one)

    wanted = fed.fold.wanted()

    assert [(item.prompt_id, item.member, item.group.size) for item in wanted] == [
        ("l000000", 0, 2),
        ("l000000", 1, 2),
        ("l000001", 0, 1),
    ]
    assert [item.group.estimator for item in wanted[1:]] == [together, alone]
    rows = [row.metadata for row in wanted[0].group.given]
    assert [(row["turn"], row["tenant"], row["by"], row["reward"]) for row in rows] == [
        ("t0", "anna", "user", 0.5),
        ("t1", "anna", "judge", -1.0),
    ]


@pytest.mark.parametrize("name", SOURCES)
def test_each_source_names_its_prompts_by_its_letter(name: str):
    source, state = SOURCES[name](config(live={"fraction": 0.5})), PrompterFold(config()).state
    state.origins.append("p000007")
    state.requests[0] = EvalRequested("e000000", 0, 4, 0.0)
    state.live, state.live_admitted = {0: admitted(0)}, 1

    numbers = iter(source.numbers(state))
    group = source.group(state, next(numbers))

    assert group.prompt_id == prompt_name(source.letter, 0)
    assert set(group.tasks) == {name if name in ("warmup", "live") else "task"}
    assert group.stage == source.stage
    assert stage_of(group.prompt_id) == source.stage


TWO = {
    "words": {"source": "reverse", "share": 2, "temperature": 0.5},
    "sums": {"source": "sum", "group_size": 3, "advantage": "centered"},
}


def test_tasks_are_issued_by_their_shares_with_their_own_rules_within_the_credit():
    fed = Feed(PrompterFold(config(tasks=TWO)))
    wanted = fed.fold.wanted()

    assert issue(fed) == [
        *("p000000-0", "p000000-1", "p000001-0", "p000001-1", "p000002-0", "p000002-1", "p000002-2"),
        *("p000003-0", "p000003-1"),
    ]
    assert fed.fold.wanted() == []  # two batches of two groups, whatever their sizes
    rules = {(item.task, item.group.size, item.group.temperature, item.group.estimator) for item in wanted}
    assert rules == {("words", 2, 0.5, "grpo"), ("sums", 3, 1.0, "centered")}
    assert [item.places for item in wanted if item.member == 0] == [range(at, at + 1) for at in range(4)]

    fed.fold.state.again["p000002-2"] = 1  # a member that is issued again keeps the rules of its group
    fed.dropped("p000000")

    assert [(item.prompt_id, item.task, item.attempt) for item in fed.fold.wanted()][:2] == [
        ("p000002", "sums", 1),
        ("p000004", "words", 0),
    ]
    fed.dropped("p000002")
    assert fed.fold.state.again == {}


def test_issued_again_and_held_out_prompts_belong_to_the_task_of_their_row():
    fold = PrompterFold(config(tasks=TWO))
    fold.state.origins += ["p000005", "p000007"]
    fold.state.requests[0] = EvalRequested("e000000", 3, 4, 0.0)

    again = [fold.sources["r"].group(fold.state, number) for number in (0, 1)]
    held_out = list(fold.wanted_evaluations())

    assert [(group.tasks, group.size, group.places) for group in again] == [
        (["sums"], 3, range(5, 6)),
        (["words"], 2, range(7, 8)),
    ]
    assert [item.task for item in held_out] == ["words", "words", "sums", "words"]


def test_an_evaluation_of_a_named_set_issues_each_row_as_often_as_it_wants_answers():
    sets = {"words": {"prompts": 2, "samples": 3, "temperature": 0.5}, "sums": {"prompts": 2, "source": "sum"}}
    fold = PrompterFold(config(tasks=TWO, eval={"sets": sets}))
    fold.state.requests[0] = EvalRequested("e000000", 3, 2, 0.5, dataset="words", samples=3)
    fold.state.requests[1] = EvalRequested("e000001", 3, 2, 0.0, dataset="sums")

    held_out = list(fold.wanted_evaluations())

    assert [(item.member, item.places.start) for item in held_out if item.prompt_id == "e000000"] == [
        *((0, 0), (1, 0), (2, 0)),
        *((3, 1), (4, 1), (5, 1)),
    ]
    assert [(item.task, item.group.data, item.group.size, item.group.temperature) for item in held_out[5:7]] == [
        ("words", "held-out/words", 6, 0.5),
        ("sums", "held-out/sums", 2, 0.0),
    ]


def test_admitted_turns_are_issued_in_their_order_beside_the_task_and_once():
    fed = feed(live={"fraction": 0.5, "advantage": "less_others"})
    for number in range(3):
        fed.publish(admitted(number, temperature=0.5))
    wanted = [item for item in fed.fold.wanted() if item.prompt_id.startswith("l")]

    assert [(item.group.given[0].metadata["turn"], item.min_version) for item in wanted] == [("t0", 0), ("t1", 0)]
    assert {(item.group.size, item.group.temperature, item.group.estimator) for item in wanted} == {
        (1, 0.5, "less_others")
    }
    assert sorted({name.split("-")[0] for name in issue(fed)}) == ["l000000", "l000001", "p000000", "p000001"]
    assert fed.fold.state.live.keys() == {2}
    fed.dropped("l000000").dropped("l000001")
    assert issue(fed) == ["p000002-0", "p000002-1", "l000002-0"]


def test_an_issue_that_is_read_before_its_turn_was_admitted_is_not_made_again():
    fed = feed(live={"fraction": 1.0}).issued("l000000-0", size=1)
    fed.publish(admitted(0)).publish(admitted(1))

    assert issue(fed) == ["l000001-0"], "and with a share of 1 no row of a task is"


def test_without_a_share_turns_wait_for_nobody():
    fed = feed().publish(admitted(0))

    assert all(name.startswith("p") for name in issue(fed))
