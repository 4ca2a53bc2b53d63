"""Which sessions a canary answers, and which replies count in its comparison."""

import msgspec
import numpy as np

from asyncrl.live.tenant_keys import owner_of, tenant_digest
from asyncrl.live.traffic_split import Arm, Trials
from topics.promotions import CanaryEnded, WeightsCanaried, WeightsPromoted

ANNA = owner_of("anna", "")
NAMES = [f"s{number}" for number in range(2000)]


def canary(share: float = 0.25, owner: str = "", version: int = 2) -> WeightsCanaried:
    return WeightsCanaried(0, version, "d", "0:1:d", "command", 1, share, owner)


def chosen(trials: Trials, owner: str = ANNA) -> set[str]:
    return {name for name in NAMES if trials.arm(owner, name).canary}


def test_a_share_of_sessions_has_the_canary_the_same_in_every_process_and_others_with_the_next_one():
    trials, other = Trials(), Trials()
    assert trials.arm(ANNA, "s") == Arm()
    for one in (trials, other):
        one.apply(canary(), 7)
    first = chosen(trials)

    assert 400 < len(first) < 600
    assert chosen(other) == first
    assert trials.arm(ANNA, next(iter(first))) == Arm(7, True, "0:2:d")
    assert {trials.arm(ANNA, name) for name in NAMES if name not in first} == {Arm(7, False, "0:1:d")}
    trials.apply(canary(version=3), 8)
    assert len(chosen(trials) & first) < 250


def test_a_canary_may_be_of_a_tenant_or_a_user_alone():
    trials = Trials()
    trials.apply(canary(1.0, tenant_digest("anna")), 7)
    assert chosen(trials) == chosen(trials, owner_of("anna", "eve")) == {*NAMES}
    assert trials.arm(owner_of("ben", ""), "s") == Arm()

    trials.apply(canary(0.5, owner_of("anna", "eve")), 8)
    assert trials.arm(ANNA, "s") == Arm()
    assert 0 < len(chosen(trials, owner_of("anna", "eve"))) < len(NAMES)


def test_sessions_that_a_shadow_answers_besides_are_all_answered_by_what_is_live():
    trials, shown = Trials(), Trials()
    trials.apply(msgspec.structs.replace(canary(), shadow=True), 7)
    shown.apply(canary(), 7)

    assert chosen(trials) == set()
    shadowed = {name for name in NAMES if trials.arm(ANNA, name).shadow}
    assert shadowed == chosen(shown)
    assert {trials.arm(ANNA, name) for name in shadowed} == {Arm(shadow=7, version=2)}
    assert Arm(shadow=7, version=2).first == "" and not Arm(shadow=7, version=2).holds(np.full(3, 2, np.int32), [0])


def test_it_is_over_when_it_is_rolled_back_and_when_the_channel_moves():
    for end in (CanaryEnded("0:2:d", "reward", 7, "worse"), WeightsPromoted(0, 2, "d", "canary", 7)):
        trials = Trials()
        trials.apply(canary(0.9), 7)
        trials.apply(end, 8)
        assert {trials.arm(ANNA, name) for name in NAMES} == {Arm()}


def test_only_replies_of_one_side_alone_count():
    arm, two = Arm(7, True, "0:2:d"), np.full(3, 2, np.int32)
    assert arm.holds(two, [0])
    assert not arm.holds(np.array([2, 2, 1], np.int32), [0])  # it fell back in the middle
    assert not arm.holds(two, [1])  # another lineage
    assert not arm.holds(two, [-1, 0])  # it goes on with tokens whose lineage nobody knows
    assert not arm.holds(two[:0], [])
    assert not Arm().holds(two, [0])
