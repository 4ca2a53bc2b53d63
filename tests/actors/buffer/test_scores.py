"""Evaluations end in one score, whatever fails, is late or begins anew; batches are packed beside them."""

import pytest

from actors.buffer.fold import BufferFold
from actors.buffer.state import BufferState
from asyncrl.config.held_out import HeldOut
from harness.buffer_feed import feed
from topics.batches import BatchPacked, Objective
from topics.evals import EvalScored
from topics.trajectories import TrajectoryDropped
from topics.wire import decode, encode

NAME = "e000003"


def evaluation(size=3, **changes):
    fed = feed(**changes)
    for member in range(size):
        fed.issued(f"{NAME}-{member}", size=size, stage="eval", at_s=10, min_version=20)
    return fed


def graded(fed, member, reward, *, size=3, versions=((20, 4),)):
    return fed.graded(f"{NAME}-{member}", reward, versions=versions, size=size, stage="eval")


def scores(decisions):
    return [decision for decision in decisions if isinstance(decision, EvalScored)]


def test_it_is_scored_once_when_every_member_is_graded():
    fed = graded(graded(evaluation(), 2, 1.0), 0, 0.5)
    assert fed.read_back(fed.fold.decide(12)) == []

    graded(fed, 1, 0.0, versions=((20, 1), (21, 2)))
    [scored] = scores(fed.read_back(fed.fold.decide(14)))

    assert (scored.eval_id, scored.version, scored.prompts, scored.failed) == (NAME, 20, 3, 0)
    assert (scored.accuracy, scored.versions, scored.seconds, scored.reason) == (0.5, {20: 9, 21: 2}, 4.0, "")
    assert [(member.trajectory_id, member.reward) for member in scored.members] == [
        (f"{NAME}-0", 0.5),
        (f"{NAME}-1", 0.0),
        (f"{NAME}-2", 1.0),
    ]
    assert fed.fold.decide(1000) == []
    graded(fed, 1, 1.0)
    assert (fed.fold.decide(1000), fed.fold.state.late, fed.fold.open) == ([], 1, 0)


def test_a_failure_counts_as_reward_0_and_ends_with_its_reason():
    fed = graded(graded(evaluation(), 0, 1.0), 1, 0.5)
    fed.failed(f"{NAME}-2", "reward", size=3)

    [dropped] = fed.read_back(fed.fold.decide(12))
    assert isinstance(dropped, TrajectoryDropped)
    assert (dropped.trajectory_id, dropped.reason, dropped.detail) == (
        f"{NAME}-2",
        "reward",
        "it did",
    )
    [scored] = scores(fed.read_back(fed.fold.decide(12)))

    assert (scored.accuracy, scored.failed, len(scored.members)) == (0.5, 1, 2)
    assert scored.reason == "1 of 3 answers have no grade: 1 failed, the last one: reward: it did"


@pytest.mark.parametrize("answered", [0, 1, 2])
def test_members_that_are_open_at_the_deadline_count_as_failed(answered):
    fed = evaluation()
    for member in range(answered):
        graded(fed, member, 1.0)
    assert fed.fold.decide(109) == []

    drops = fed.read_back(fed.fold.decide(111))
    [scored] = scores(fed.read_back(fed.fold.decide(111)))

    assert [drop.reason for drop in drops] == ["deadline"] * (3 - answered)
    assert (scored.accuracy, scored.failed) == (pytest.approx(answered / 3), 3 - answered)
    assert scored.reason == f"{3 - answered} of 3 answers have no grade: they were open at eval.deadline_s"


def test_no_deadline_passes_while_members_are_still_to_be_issued():
    fed = evaluation(2)
    fed.fold.state.groups[NAME].size = 3
    graded(fed, 0, 1.0)
    assert fed.fold.decide(500) == []
    assert fed.fold.next_deadline() is None

    fed.issued(f"{NAME}-2", size=3, stage="eval", at_s=500)

    assert fed.fold.next_deadline() == 600
    assert fed.fold.decide(599) == []
    assert len(fed.fold.decide(601)) == 2


def test_batches_are_packed_beside_it_and_a_batch_never_takes_it():
    fed = graded(graded(evaluation(), 0, 1.0), 1, 1.0)
    fed.group("p000000").group("p000001")
    [packed] = fed.read_back(fed.fold.decide(12))
    assert isinstance(packed, BatchPacked)
    assert [group.prompt_id for group in packed.groups] == ["p000000", "p000001"]

    graded(fed, 2, 1.0)

    assert len(scores(fed.read_back(fed.fold.decide(12)))) == 1


def test_equal_rewards_of_all_members_filter_nothing():
    fed = evaluation(objective=lambda step, stage: Objective(filters=["zero_variance"]))
    for member in range(3):
        graded(fed, member, 1.0)

    assert [scored.accuracy for scored in scores(fed.fold.decide(12))] == [1.0]


def test_a_buffer_that_takes_over_scores_what_the_one_before_had_read():
    fed = graded(graded(evaluation(), 0, 1.0), 1, 0.0)
    before, fed.fold = fed.fold, BufferFold(fed.fold._plan)
    fed.fold.state = decode(BufferState, encode(before.state))

    graded(fed, 2, 1.0)

    assert [scored.accuracy for scored in scores(fed.fold.decide(12))] == [pytest.approx(2 / 3)]


def test_grades_read_before_the_issues_count():
    fed = feed()
    fed.known.add(NAME)
    for member in range(3):
        graded(fed, member, 1.0)
    assert fed.fold.decide(500) == []

    for member in range(3):
        fed.issued(f"{NAME}-{member}", size=3, stage="eval", at_s=10, min_version=20)

    assert len(scores(fed.fold.decide(12))) == 1


def test_an_evaluation_of_several_tasks_has_an_accuracy_of_each():
    fed = feed()
    for member, task in enumerate(("words", "words", "sums")):
        fed.issued(f"{NAME}-{member}", size=3, stage="eval", at_s=10, task=task)
    graded(graded(fed, 0, 1.0), 2, 0.5).failed(f"{NAME}-1", size=3)

    drops = fed.read_back(fed.fold.decide(12))
    [scored] = scores(fed.read_back(fed.fold.decide(12)))

    assert [(drop.trajectory_id, drop.task) for drop in drops] == [(f"{NAME}-1", "words")]
    assert scored.metrics == {"task/words/accuracy": 0.5, "task/sums/accuracy": 0.5}  # what failed counts as 0


def test_the_deadline_of_evaluations_is_their_own():
    fed = evaluation(deadline_s={"warmup": 100.0, "rl": 100.0, "eval": 30.0})
    fed.issued("p000000-0", at_s=10)
    assert fed.fold.next_deadline() == 40.0
    assert fed.fold.decide(39) == []

    drops = fed.read_back(fed.fold.decide(41))

    assert [(drop.trajectory_id, drop.reason) for drop in drops] == [(f"{NAME}-{n}", "deadline") for n in range(3)]
    assert [scored.failed for scored in scores(fed.read_back(fed.fold.decide(41)))] == [3]
    assert fed.fold.next_deadline() == 110.0


def test_several_answers_of_each_prompt_give_pass_at_k_and_what_is_not_graded_is_not_correct():
    fed = feed(held_out={"hard": HeldOut("hard", 2, 3, 1.0, 8, [1, 2, 3], 0.5)})
    for member in range(6):
        fed.issued(f"{NAME}-{member}", size=6, stage="eval", at_s=10, min_version=20, task="hard")
    for member, reward in enumerate((1.0, 0.0, 0.4, 0.5, 0.6)):
        graded(fed, member, reward, size=6)
    fed.failed(f"{NAME}-5", size=6)
    fed.read_back(fed.fold.decide(12))

    [scored] = scores(fed.read_back(fed.fold.decide(12)))

    assert (scored.dataset, scored.prompts, scored.samples, scored.failed) == ("hard", 2, 3, 1)
    assert scored.accuracy == pytest.approx(2.5 / 6)
    assert scored.metrics == {  # one of three correct answers, and two of three
        "pass@1": pytest.approx((1 / 3 + 2 / 3) / 2),
        "pass@2": pytest.approx((2 / 3 + 1) / 2, abs=1e-6),
        "pass@3": 1.0,
    }
