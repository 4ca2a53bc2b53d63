"""Admission: at most (max_lag + 1) * batch_groups groups are open, and each end returns one credit, once."""

from pathlib import Path

import pytest

from actors.prompter.actor import decide
from actors.prompter.fold import PrompterFold
from asyncrl.data.sources import open_source
from harness.folds import Feed
from harness.prompter_feed import config, feed, issue
from topics.evals import EvalRequested
from topics.groups import GroupDropped
from topics.ids import EVALUATION, prompt_name
from topics.streams import AdmissionPaused, AdmissionResumed
from topics.weights import TrainingFinished
from topics.wire import decode, encode


def test_the_open_limit_is_lag_plus_one_batches():
    fed = feed()

    assert issue(fed) == [f"p{n:06d}-{k}" for n in range(4) for k in range(2)]
    assert fed.fold.wanted() == []
    assert fed.fold.open_groups == 4


def test_a_trained_batch_returns_its_credits_and_raises_the_least_version():
    fed = feed()
    issue(fed)
    fed.packed(1, "p000000", "p000002")
    assert fed.fold.wanted() == []
    fed.trained(1)
    fed.packed(2, "p000001", "p000003").trained(2)

    least = {item.prompt_id: item.min_version for item in fed.fold.wanted()}

    assert least == {"p000004": 1, "p000005": 1, "p000006": 2, "p000007": 2}


def test_what_is_issued_while_a_batch_waits_for_the_learner_is_no_older_than_the_batch_behind_it_takes():
    fed = feed()
    issue(fed)
    fed.packed(1, "p000000", "p000002").trained(1)
    issue(fed)
    fed.packed(2, "p000001", "p000003")  # and it is not trained

    fed.publish(GroupDropped("p000004", "lag", 2))

    assert {item.min_version for item in fed.fold.wanted()} == {1}


def test_a_group_waits_for_the_oldest_version_that_the_batch_it_will_be_in_takes():
    fed = feed(buffer={"batch_groups": 2, "max_lag": 2}, learner={"steps": 9})
    assert {item.min_version for item in fed.fold.wanted()} == {0}
    issue(fed)
    fed.packed(1, "p000000", "p000001").trained(1)

    # Four groups are ahead of them: they will be in batch 4, which takes no token of a version below 1.
    assert {(item.prompt_id, item.min_version) for item in fed.fold.wanted()} == {("p000006", 1), ("p000007", 1)}


def test_a_group_waits_for_no_version_that_is_not_published():
    fed = feed(buffer={"batch_groups": 2, "max_lag": 2}, learner={"steps": 9, "publish_every": 2})
    issue(fed)
    fed.packed(1, "p000000", "p000001").trained(1)

    assert {item.min_version for item in fed.fold.wanted()} == {0}


def test_without_a_learner_a_packed_batch_returns_its_credits_and_every_version_is_the_first():
    roles = ["prompter", "rollout", "reward", "buffer", "engine"]
    fed = feed(only=roles, rollout={"group_size": 2, "slots": 2}, buffer={"batch_groups": 2, "max_lag": 5})
    assert len(issue(fed)) == 2 * 5  # a batch, and twice what fills the slots

    fed.packed(1, "p000000", "p000002")
    wanted = fed.fold.wanted()

    assert sorted({item.prompt_id for item in wanted}) == ["p000005", "p000006"]
    assert {item.min_version for item in wanted} == {0}
    for step, first, second in ((2, 1, 3), (3, 4, 5), (4, 6, 7)):
        issue(fed)
        fed.packed(step, f"p{first:06d}", f"p{second:06d}")
    issue(fed)
    assert fed.fold.open_groups == 2  # those of the last of five batches


def test_no_prompt_is_issued_behind_the_end_of_the_data():
    fed = Feed(PrompterFold(config(task={"epochs": 1})))
    fed.fold.opened("task", 5)
    assert len(issue(fed)) == 4 * 2
    assert not fed.fold.at_end

    fed.dropped("p000000").dropped("p000001").dropped("p000002")

    assert issue(fed, 1) == ["p000004-0", "p000004-1"]  # a crash comes in between
    assert not fed.fold.at_end
    assert issue(fed) == ["p000004-1"]
    assert fed.fold.at_end
    assert fed.dropped("p000003").fold.wanted() == []


@pytest.mark.parametrize("order", ["packed first", "trained first"])
def test_the_order_between_logs_does_not_matter(order):
    fed = feed()
    issue(fed)
    if order == "packed first":
        fed.packed(1, "p000000", "p000001").trained(1)
    else:
        fed.trained(1).packed(1, "p000000", "p000001")

    assert fed.fold.open_groups == 2
    assert {item.prompt_id for item in fed.fold.wanted()} == {"p000004", "p000005"}


def test_an_end_read_before_its_issue_still_returns_one_credit():
    fed = feed()
    fed.packed(1, "p000000", "p000001").trained(1)
    for name in ("p000000-0", "p000000-1", "p000001-0", "p000001-1"):
        fed.issued(name)

    assert fed.fold.open_groups == 0


def test_a_batch_trained_twice_returns_its_credits_once():
    fed = feed()
    issue(fed)
    fed.packed(1, "p000000", "p000001").trained(1).trained(1)

    assert fed.fold.open_groups == 2


def test_a_dropped_group_is_replaced():
    fed = feed()
    issue(fed)
    fed.dropped("p000003")

    assert {item.prompt_id for item in fed.fold.wanted()} == {"p000004"}


def test_a_trajectory_too_old_is_issued_again_once_where_the_config_asks_for_it():
    fed = feed(buffer={"batch_groups": 2, "max_lag": 1, "stale": "reissue"})
    issue(fed)
    fed.too_old("p000001-1")

    (again,) = fed.fold.wanted()
    assert (again.prompt_id, again.member, again.attempt) == ("p000001", 1, 1)
    fed.issued("p000001-1", attempt=1)
    assert fed.fold.wanted() == []
    fed.too_old("p000001-1", attempt=1)
    assert [item.attempt for item in fed.fold.wanted()] == [2]
    assert fed.fold.open_groups == 4


def test_a_group_cut_short_by_a_crash_is_finished_first():
    fed = feed()
    issue(fed, count=3)

    again = issue(fed)

    assert again[0] == "p000001-1"
    assert len(again) == 5
    assert fed.fold.open_groups == 4


def test_a_batch_that_was_packed_before_batches_became_larger_takes_what_it_holds():
    fed = feed(buffer={"batch_groups": 3, "max_lag": 8}, learner={"steps": 3})
    for group in range(2):
        for member in range(2):
            fed.issued(f"p{group:06d}-{member}")
    fed.packed(1, "p000000", "p000001")

    issue(fed)

    assert fed.fold.open_groups == 2 + 3 + 3


def test_no_more_is_issued_than_the_steps_still_need():
    fed = feed(learner={"steps": 1})

    assert len(issue(fed)) == 2 * 2
    fed.packed(1, "p000000", "p000001").trained(1)
    assert fed.fold.wanted() == []


def test_the_warm_up_comes_first_with_numbers_of_its_own():
    fed = feed(warmup={"steps": 1, "batch_rows": 4, "rows_per_trajectory": 2})

    assert issue(fed) == ["w000000-0", "w000001-0"]
    assert fed.fold.wanted() == []
    fed.packed(0, "w000000", "w000001", stage="warmup")

    assert issue(fed)[0] == "p000000-0"


def test_rl_does_not_stand_in_the_way_of_what_replaces_a_failed_warm_up_trajectory():
    fed = feed(warmup={"steps": 2, "batch_rows": 4, "rows_per_trajectory": 2})
    issue(fed)
    fed.dropped("w000001").packed(-1, "w000000", "w000002", stage="warmup")

    assert issue(fed) == ["w000004-0"]
    fed.trained(-1, stage="warmup").packed(0, "w000003", "w000004", stage="warmup")
    assert {item.group.stage for item in fed.fold.wanted()} == {"rl"}


def test_the_first_message_of_a_group_alone_carries_its_rows():
    fed = feed(buffer={"batch_groups": 2, "max_lag": 1, "stale": "reissue"})
    carriers = [item for item in fed.fold.wanted() if item.places]
    assert [(item.prompt_id, item.member, item.places) for item in carriers] == [
        (f"p{number:06d}", 0, range(number, number + 1)) for number in range(4)
    ]

    issue(fed)
    fed.too_old("p000001-0")

    (again,) = fed.fold.wanted()
    assert (again.prompt_id, again.member, list(again.places)) == ("p000001", 0, [])


def test_each_supervised_trajectory_carries_rows_of_its_own():
    fed = feed(warmup={"steps": 1, "batch_rows": 4, "rows_per_trajectory": 2})

    carriers = [item for item in fed.fold.wanted() if item.places]

    assert [(item.prompt_id, item.places) for item in carriers] == [("w000000", range(2)), ("w000001", range(2, 4))]


def test_a_message_is_a_pure_function_of_number_seed_and_data():
    row = open_source("reverse", options={"letters": 3}, seed=1, base=Path()).row(1)
    wanted = feed().fold.wanted()

    first, again = (decide(wanted[3], 1, []) for _ in range(2))
    other = decide(wanted[2], 1, [row])

    assert first == again
    assert first.trajectory_id == "p000001-1"
    assert first.rows == []
    assert other.rows == [row]
    assert first.seed != other.seed


def asked(fed, number, prompts=3):
    return fed.publish(EvalRequested(prompt_name(EVALUATION, number), 5 * number, prompts, 0.0))


def evaluations(fed, count=None):
    """Issue members of evaluations."""
    wanted = list(fed.fold.wanted_evaluations())
    for item in wanted[:count]:
        fed.issued(f"{item.prompt_id}-{item.member}", size=item.group.size, stage="eval")
    return [f"{item.prompt_id}-{item.member}" for item in wanted]


def test_an_evaluation_is_issued_beside_training_and_takes_no_credit():
    fed = asked(feed(), 4)
    before = [item.prompt_id for item in fed.fold.wanted()]
    wanted = list(fed.fold.wanted_evaluations())

    assert evaluations(fed) == ["e000004-0", "e000004-1", "e000004-2"]

    assert {(item.group.data, item.min_version, item.group.temperature) for item in wanted} == {("held-out", 20, 0.0)}
    assert [item.places for item in wanted] == [range(0, 1), range(1, 2), range(2, 3)]
    assert [item.prompt_id for item in fed.fold.wanted()] == before
    assert (fed.fold.open_groups, evaluations(fed)) == (0, [])


def test_an_evaluation_that_is_asked_for_twice_is_issued_once():
    fed = asked(asked(feed(), 4), 4)
    assert len(evaluations(fed)) == 3

    asked(fed, 4)

    assert evaluations(fed) == []


def test_evaluations_cut_short_go_on_where_they_were_and_none_is_superseded():
    fed = asked(feed(), 4)
    evaluations(fed, 1)
    asked(fed, 5)

    assert evaluations(fed, 3) == ["e000004-1", "e000004-2", "e000005-0", "e000005-1", "e000005-2"]
    before, fed.fold = fed.fold.state, PrompterFold(config())
    fed.fold.state = decode(type(before), encode(before))

    assert evaluations(fed) == ["e000005-1", "e000005-2"]
    assert fed.fold.state.requests == {}


def test_issues_read_before_the_request_are_not_repeated():
    fed = feed()
    for member in range(3):
        fed.issued(f"e000004-{member}", size=3, stage="eval")
    fed.issued("e000005-0", size=3, stage="eval")

    asked(asked(fed, 4), 5)

    assert evaluations(fed) == ["e000005-1", "e000005-2"]


def test_the_last_evaluation_is_issued_when_training_has_finished():
    fed = asked(feed(learner={"steps": 2}), 2)
    fed.publish(TrainingFinished(2, "here"))

    assert fed.fold.wanted() == []
    assert len(evaluations(fed)) == 3


def test_full_streams_hold_an_evaluation_back_that_was_not_begun():
    fed = asked(feed(), 4).publish(AdmissionPaused("full"))
    assert evaluations(fed) == []

    fed.publish(AdmissionResumed("room"))

    assert len(evaluations(fed)) == 3


def test_no_evaluation_has_more_prompts_than_there_are_held_out_rows():
    fed = asked(feed(), 4)
    fed.fold.opened("held-out", 2)

    assert evaluations(fed) == ["e000004-0", "e000004-1"]
