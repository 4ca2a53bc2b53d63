"""The doctor about workers: of pools and of whole groups that are missing or hang, and rewards that fail."""

import msgspec

from asyncrl.config.task_settings import RewardSettings
from asyncrl.state.status import run_status
from harness.folds import failure
from harness.states import NOW_S, MadeState, work
from topics.actors import ActorStarted, FleetScaled
from topics.groups import GroupDropped
from topics.roles import WorkerPool
from topics.table import BUILT_IN


def case_of_groups(workers=1, **settings):
    case = MadeState()
    case.state.config.reward = msgspec.convert({"scope": "group", "function": "a.py:b", **settings}, RewardSettings)
    for number in range(1, workers + 1):
        case.publish(ActorStarted("groupreward", f"groupreward-{number}", "elsewhere", 1), at_s=1.0)
        case.vitals(f"groupreward-{number}")
    return case


def test_complete_groups_that_nobody_grades_are_found():
    case = case_of_groups(workers=0).publish(FleetScaled({"groupreward": 0}))
    case.queue("groupreward", waiting=5, pulls=0)

    assert case.found() == [("no worker", "groupreward")]
    assert case.evidence() == "5 wait in its queue; groupreward was scaled to 0, none asks for work"


def test_a_group_that_is_graded_for_too_long_is_found_with_its_limit():
    case = case_of_groups().vitals("groupreward-1", work("p000007", held_s=60)).queue("groupreward", under_way=2)

    assert case.found() == [("reward hanging", "groupreward-1")]
    assert case.evidence() == (
        "grades p000007, which it has had for 60 s, 0 done before; "
        "groupreward workers have 2, 0 more wait; reward.time_limit_s is 30"
    )
    case.state.config.reward.tournament = "swiss"
    assert "reward.tournament_limit_s is 300" in case.evidence()


def test_rewards_that_fail_are_found_until_a_batch_is_packed():
    case = case_of_groups().queue("groupreward")
    for member in range(2):
        case.publish(failure(f"p000007-{member}", "reward", detail="ValueError: no judge"))
    assert case.found() == [("unexplained", "demo")]
    case.publish(GroupDropped("p000007", "failed", 2))

    assert case.found() == [("reward failing", "groupreward")]
    assert case.evidence() == (
        "2 trajectories got no reward since the last batch, and 1 groups ended with that; the last failure: "
        "p000007-1 reward: ValueError: no judge"
    )
    case.packed(6, at_s=NOW_S - 1)
    assert ("reward failing", "groupreward") not in case.found()
    alone = MadeState().publish(failure("p000007-0", "reward"))
    assert alone.publish(GroupDropped("p000007", "failed", 2)).found() == [("reward failing", "reward")]


def test_a_pool_that_was_scaled_to_0_is_found_while_the_run_trains():
    case = MadeState(last_step_s=NOW_S - 1).publish(FleetScaled({"rollout-code": 0}))
    case.state.tables = BUILT_IN.with_pools([WorkerPool("rollout", "code", ("coder",))])
    assert case.found() == []

    case.queue("rollout-code", waiting=7, pulls=0)

    assert case.found() == [("no worker", "rollout-code")]
    assert case.evidence() == "7 wait in its queue; rollout-code was scaled to 0, none asks for work"


def test_the_status_counts_the_processes_of_each_pool():
    case = MadeState().publish(FleetScaled({"rollout-code": 2}))
    for number in (1, 2):
        case.publish(ActorStarted("rollout", f"rollout-code-{number}", "elsewhere", 1))

    status = run_status(case.state, case.state.now_ns)
    assert (status.pools["rollout"].live, status.pools["rollout-code"].live) == (1, 2)
    assert (status.wanted["rollout"], status.wanted["rollout-code"]) == (1, 2)
