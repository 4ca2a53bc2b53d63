"""Ends, groups, lag and batches are decided by the buffer alone, as a pure function of what it read."""

import msgspec
import pytest

from actors.buffer.state import Plan
from asyncrl.algorithms.losses import LOSSES
from asyncrl.config.settings import Config
from harness.buffer_feed import feed
from topics.batches import BatchPacked, Objective
from topics.groups import GroupDropped
from topics.secrets import PurgeRequested
from topics.trajectories import TrajectoryDropped
from topics.turns import TurnOverruled


def messages(decisions):
    return decisions


def only_batch(decisions):
    (message,) = messages(decisions)
    assert isinstance(message, BatchPacked)
    return message


def test_a_batch_takes_the_groups_in_the_order_of_their_completion():
    fed = feed()
    fed.graded("p000000-0").group("p000002").group("p000001").graded("p000000-1")

    batch = only_batch(fed.fold.decide(0))

    assert [group.prompt_id for group in batch.groups] == ["p000002", "p000001"]
    assert (batch.step, batch.min_version) == (1, -1)
    assert [member.trajectory_id for member in batch.groups[0].members] == ["p000002-0", "p000002-1"]


def test_at_most_ahead_batches_wait_behind_the_one_in_training():
    fed = feed()
    for number in range(8):
        fed.group(f"p{number:06d}", versions=[(2, 3)])
    steps = []
    while decisions := fed.read_back(fed.fold.decide(0)):
        steps.append(only_batch(decisions).step)
    assert steps == [1, 2]

    fed.trained(1)

    assert only_batch(fed.fold.decide(0)).step == 3


def test_with_ahead_zero_packing_waits_for_training():
    fed = feed(ahead=0)
    for number in range(4):
        fed.group(f"p{number:06d}")
    fed.read_back(fed.fold.decide(0))

    assert fed.fold.decide(0) == []
    fed.trained(1)
    assert only_batch(fed.fold.decide(0)).step == 2


def test_a_decision_takes_effect_when_it_is_read_back():
    fed = feed()
    fed.group("p000000").group("p000001")

    assert fed.fold.decide(0) == fed.fold.decide(0)
    fed.read_back(fed.fold.decide(0))
    assert fed.fold.decide(0) == []


def test_a_trajectory_behind_max_lag_is_dropped_with_its_lag():
    fed = feed(steps=20)
    for step in range(1, 7):
        fed.packed(step, f"q{step}").trained(step)
    fed.graded("p000000-0", versions=[(2, 3)], size=3).graded("p000000-1", versions=[(6, 3)], size=3)
    fed.graded("p000000-2", versions=[(5, 3)], size=3)
    fed.group("p000001", versions=[(6, 3)])

    drops = messages(fed.read_back(fed.fold.decide(0)))
    batch = only_batch(fed.fold.decide(0))

    assert drops == [TrajectoryDropped(trajectory_id="p000000-0", attempt=0, reason="lag", tokens=3, lag=4)]
    assert [member.trajectory_id for member in batch.groups[0].members] == ["p000000-1", "p000000-2"]
    assert batch.min_version == 5


@pytest.mark.parametrize(("drop_stale", "dropped"), [(False, False), (True, True)])
def test_a_partly_stale_trajectory_is_kept_for_masking_or_dropped(drop_stale, dropped):
    fed = feed(steps=20, drop_stale=drop_stale, min_fresh=0.25)
    for step in range(1, 7):
        fed.packed(step, f"q{step}").trained(step)
    for number in range(2):
        fed.group(f"p{number:06d}", versions=[(4, 3), (6, 1)])

    decisions = messages(fed.fold.decide(0))

    assert isinstance(decisions[0], GroupDropped if dropped else BatchPacked)


def test_a_group_with_fewer_than_two_fresh_members_is_dropped_whole():
    fed = feed(steps=20)
    for step in range(1, 7):
        fed.packed(step, f"q{step}").trained(step)
    fed.graded("p000000-0", versions=[(2, 3)]).graded("p000000-1", versions=[(6, 3)]).group("p000001")

    assert messages(fed.fold.decide(0)) == [
        GroupDropped("p000000", "lag", members=2, tokens=6),
        GroupDropped("p000001", "lag", members=2, tokens=6),
    ]


def test_a_stale_member_can_be_issued_again_and_its_group_waits_for_it():
    fed = feed(steps=20, drop_stale=True, reissue=True, batch_groups={"warmup": 1, "rl": 1})
    for step in range(1, 7):
        fed.packed(step, f"q{step}").trained(step)
    fed.graded("p000000-0", versions=[(2, 3)]).graded("p000000-1", versions=[(6, 3)])

    drops = messages(fed.read_back(fed.fold.decide(0)))
    assert [(drop.trajectory_id, drop.reason) for drop in drops] == [("p000000-0", "lag")]
    assert fed.fold.decide(0) == []
    fed.graded("p000000-0", versions=[(2, 3)])
    assert fed.fold.decide(0) == []  # the first attempt's grade, delivered again
    fed.graded("p000000-0", 0.5, versions=[(6, 3)], attempt=1)

    batch = only_batch(fed.fold.decide(0))
    assert [(member.attempt, member.reward) for member in batch.groups[0].members] == [(1, 0.5), (0, 1.0)]


def test_a_turn_of_live_traffic_that_is_too_old_ends_and_is_never_sampled_again():
    fed = feed(steps=20, drop_stale=True, reissue=True, batch_groups={"warmup": 1, "rl": 1})
    for step in range(1, 7):
        fed.packed(step, f"q{step}").trained(step)

    fed.graded("l000000-0", versions=[(2, 3)], size=1)

    assert messages(fed.fold.decide(0)) == [GroupDropped("l000000", "lag", members=1, tokens=3)]


def test_a_failed_member_ends_and_the_rest_is_packed():
    fed = feed()
    for member in (0, 1):
        fed.graded(f"p000000-{member}", size=3)
    fed.failed("p000000-2", size=3).group("p000001")

    drops = messages(fed.read_back(fed.fold.decide(0)))
    batch = only_batch(fed.fold.decide(0))

    assert drops == [TrajectoryDropped(trajectory_id="p000000-2", attempt=0, reason="rollout", detail="it did")]
    assert [len(group.members) for group in batch.groups] == [2, 2]


def test_a_group_with_one_grade_left_is_dropped():
    fed = feed()
    fed.graded("p000000-0").failed("p000000-1")

    assert messages(fed.read_back(fed.fold.decide(0))) == [GroupDropped("p000000", "failed", members=2, tokens=3)]
    assert fed.fold.decide(0) == []


def test_a_group_whose_members_all_fail_is_dropped_and_the_next_one_takes_its_place():
    fed = feed()
    fed.failed("p000000-0").failed("p000000-1").group("p000001").group("p000002")

    drops = messages(fed.read_back(fed.fold.decide(0)))
    batch = only_batch(fed.fold.decide(0))

    assert drops == [GroupDropped("p000000", "failed", members=2)]
    assert [group.prompt_id for group in batch.groups] == ["p000001", "p000002"]
    assert fed.fold.state.dropped == {}


def test_a_group_of_one_needs_one_grade():
    fed = feed()
    fed.graded("p000000-0", size=1).graded("p000001-0", size=1)

    assert len(only_batch(fed.fold.decide(0)).groups) == 2


def test_groups_without_variance_can_be_dropped():
    fed = feed(objective=lambda step, stage: Objective(filters=["zero_variance"]))
    fed.group("p000000", (1.0, 1.0)).group("p000001", (0.0, 1.0)).group("p000002", (1.0, 0.0))

    assert messages(fed.read_back(fed.fold.decide(0))) == [
        GroupDropped("p000000", "zero_variance", members=2, tokens=6, rewards=[1.0, 1.0])
    ]
    assert len(only_batch(fed.fold.decide(0)).groups) == 2


def test_a_filter_of_a_pass_rate_drops_by_its_options_and_its_name_is_the_reason():
    objective = Objective(filters=["pass_rate"], filter_options={"pass_rate": {"passing": 0.5, "below": 0.9}})
    fed = feed(objective=lambda step, stage: objective)
    fed.group("p000000", (0.5, 0.7)).group("p000001", (0.0, 0.6)).group("p000002", (0.9, 0.4))

    assert messages(fed.read_back(fed.fold.decide(0))) == [
        GroupDropped("p000000", "pass_rate", members=2, tokens=6, rewards=[0.5, 0.7])
    ]
    batch = only_batch(fed.fold.decide(0))
    assert [group.prompt_id for group in batch.groups] == ["p000001", "p000002"]
    assert batch.objective.filter_options == objective.filter_options


def test_at_its_deadline_a_group_is_packed_with_its_graded_members():
    fed = feed(batch_groups={"warmup": 1, "rl": 1})
    for member in range(3):
        fed.issued(f"p000000-{member}", size=3, at_s=10 + member)
    fed.graded("p000000-0", size=3).graded("p000000-2", size=3)

    assert fed.fold.next_deadline() == 110.0
    assert fed.fold.decide(109.9) == []
    drops = messages(fed.read_back(fed.fold.decide(110.0)))
    batch = only_batch(fed.fold.decide(110.0))

    assert drops == [TrajectoryDropped(trajectory_id="p000000-1", attempt=0, reason="deadline")]
    assert [member.trajectory_id for member in batch.groups[0].members] == ["p000000-0", "p000000-2"]


def test_a_group_whose_ends_at_the_deadline_were_stored_in_part_waits_for_the_others():
    fed = feed(batch_groups={"warmup": 2, "rl": 1})
    for member in range(2):
        fed.graded(f"p000000-{member}", size=4)
    first, second = fed.fold.decide(111.0)
    fed.read_back([first])  # and the writer is gone

    assert messages(fed.read_back(fed.fold.decide(112.0))) == messages([second])

    (group,) = only_batch(fed.fold.decide(112.0)).groups
    assert [member.trajectory_id for member in group.members] == ["p000000-0", "p000000-1"]


def test_at_its_deadline_a_group_with_one_grade_is_dropped_with_one_credit():
    fed = feed()
    fed.issued("p000000-0", at_s=10).issued("p000000-1", at_s=10).graded("p000000-0")

    assert messages(fed.read_back(fed.fold.decide(111.0))) == [GroupDropped("p000000", "deadline", members=2, tokens=3)]
    assert fed.fold.next_deadline() is None


def test_what_comes_after_the_end_is_counted_as_late_and_changes_nothing():
    fed = feed()
    fed.group("p000000").group("p000001").read_back(fed.fold.decide(0))
    fed.graded("p000000-0").failed("p000001-1")

    assert fed.fold.state.late == 2
    assert fed.fold.decide(0) == []


def test_a_second_grade_of_a_member_is_late():
    fed = feed()
    fed.graded("p000000-0", 1.0).graded("p000000-0", 0.0).graded("p000000-1").group("p000001")

    assert only_batch(fed.fold.decide(0)).groups[0].members[0].reward == 1.0
    assert fed.fold.state.late == 1


def test_warm_up_batches_follow_the_data_whoever_was_fast():
    fed = feed(origin=-1)
    for number in (3, 1, 2):
        fed.group(f"w{number:06d}", (0.0,), stage="warmup", versions=[(-1, 9)])
    assert fed.fold.decide(0) == []
    fed.group("w000000", (0.0,), stage="warmup", versions=[(-1, 9)])

    batch = only_batch(fed.fold.decide(0))

    assert [group.prompt_id for group in batch.groups] == ["w000000", "w000001"]
    assert batch.step == 0


def test_nothing_is_packed_beyond_the_last_step():
    fed = feed(steps=1)
    for number in range(4):
        fed.group(f"p{number:06d}")
    fed.read_back(fed.fold.decide(0))
    fed.trained(1)

    assert fed.fold.decide(0) == []


def test_the_state_does_not_depend_on_the_order_between_logs():
    early, late = feed(), feed()
    early.issued("p000000-0").issued("p000000-1").group("p000000").group("p000001")
    late.group("p000000").group("p000001").issued("p000000-0").issued("p000000-1")

    assert messages(early.fold.decide(0)) == messages(late.fold.decide(0))


@pytest.mark.parametrize("again", [True, False])
def test_an_end_that_is_read_before_the_issue_and_the_grade_counts(again):
    fed = feed()
    fed.publish(TrajectoryDropped("p000000-0", 0, "lag", again=again))
    fed.group("p000000")

    group = fed.fold.state.groups["p000000"]
    assert 0 not in group.graded
    assert (group.attempts, group.dropped) == (({0: 1}, set()) if again else ({}, {0}))


def test_a_batch_records_the_objective_of_its_step_as_the_settings_are_then():
    settings = {"learner": {"lr": 1.0, "lr_warmup_steps": 4, "loss": "ppo", "loss_options": {"clip_low": 0.1}}}
    settings["learner"]["filters"] = ["zero_variance"]
    tables = {**settings, "warmup": {"steps": 2, "lr": 3.0, "lr_warmup_steps": 0}, "rollout": {"temperature": 0.7}}
    config = msgspec.convert(tables, Config)
    slower = msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, lr=0.5))

    def packed(config):
        fed = feed(objective=Plan.of(config).objective).group("p000000", (0.0, 1.0)).group("p000001", (0.0, 1.0))
        return only_batch(fed.fold.decide(0)).objective

    options = msgspec.to_builtins(LOSSES["ppo"](clip_low=0.1))
    assert packed(config) == Objective(
        loss="ppo", loss_options=options, filters=["zero_variance"], learning_rate=0.25, constant_tokens=256
    )
    assert packed(slower).learning_rate == 0.125
    assert Plan.of(config).objective(0) == Objective(loss="sft", learning_rate=3.0)


def test_a_batch_names_the_rules_that_each_group_was_issued_with():
    fed = feed()
    fed.issued("p000000-0", size=3, task="words", temperature=0.5, estimator="centered")
    fed.issued("p000001-0", task="sums", temperature=1.25, estimator="none")
    for member in range(3):
        fed.graded(f"p000000-{member}", size=3)

    groups = only_batch(fed.group("p000001").fold.decide(0)).groups

    assert [(group.task, group.temperature, group.estimator, len(group.members)) for group in groups] == [
        ("words", 0.5, "centered", 3),
        ("sums", 1.25, "none", 2),
    ]


@pytest.mark.parametrize("purged_first", [True, False])
@pytest.mark.parametrize("is_graded", [True, False])
def test_a_turn_whose_data_key_is_erased_ends_unless_it_is_packed(*, purged_first: bool, is_graded: bool):
    fed = feed(batch_groups={"warmup": 1, "rl": 3})
    request = PurgeRequested("p", "", "", "operator", ["k1"])
    fed.publish(request) if purged_first else None
    for name, keys in (("l000000-0", "k2,k1"), ("l000001-0", "k2")):
        fed.issued(name, size=1, secrets=keys)
        fed.graded(name, size=1) if is_graded else None
    fed.publish(request) if not purged_first else None

    ended = fed.fold.decide(0)

    assert [(one.prompt_id, one.reason) for one in messages(ended)] == [("l000000", "purged")]
    fed.read_back(ended)
    assert fed.fold.decide(0) == []


def test_a_turn_that_a_worker_could_not_read_ends_as_purged():
    fed = feed()
    fed.failed("l000000-0", "purged", size=1)

    assert [(one.prompt_id, one.reason) for one in messages(fed.fold.decide(0))] == [("l000000", "purged")]


@pytest.mark.parametrize("first", [True, False])
def test_a_user_overrules_the_grade_of_a_turn_until_it_is_packed(*, first: bool):
    fed = feed(batch_groups={"warmup": 1, "rl": 2})
    wanted = TurnOverruled(turn_id="b", prompt_id="l000000", reward=-0.5, member=1)
    fed.publish(wanted) if first else None
    for name, size in (("l000000-0", 2), ("l000000-1", 2), ("l000001-0", 1)):
        fed.issued(name, size=size)
        fed.graded(name, size=size)
    fed.publish(wanted) if not first else None

    [packed] = fed.fold.decide(0)

    members = [member for group in packed.groups for member in group.members]
    assert [(one.reward == -0.5, one.overruled) for one in members] == [(False, False), (True, True), (False, False)]
    fed.read_back([packed])
    fed.publish(wanted)
    assert fed.fold.state.wanted == {}
