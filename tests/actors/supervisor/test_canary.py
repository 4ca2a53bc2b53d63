"""Canaries: what begins one, what ends it, and that no order of the logs changes it."""

from __future__ import annotations

import math

import msgspec
import pytest

from actors.supervisor.divergence import Divergence
from actors.supervisor.fold import SupervisorState
from asyncrl.config.live_settings import RewardGateSettings
from harness.channels import Supervised
from topics.batches import BATCH_TRAINED, BatchTrained
from topics.promotions import (
    PROMOTION_REQUESTED,
    CanaryEnded,
    PromotionRefused,
    PromotionRequested,
    WeightsCanaried,
    WeightsPromoted,
)
from topics.turns import TURN_ADMITTED, TURN_SKIPPED, TurnAdmitted, TurnSkipped
from topics.weights import WEIGHTS_REFUSED, WeightsRefused

RULES = {"turns": 4, "margin": 0.1}


class WithCanaries(Supervised):
    """The fold of a supervisor whose engines have canaries."""

    def __init__(self, gate: str = "", **canary: object) -> None:
        self.kl_bound = 0.0
        super().__init__(canary={**RULES, **canary}, gate_metric=gate, gate_threshold=0.5)

    def decide(self, *, serves: bool = True):
        decide, stored = self.fold.state.channel.decide, self.fold.stored
        return decide(stored, self.config.weights, serves=True, canaries=True, kl_bound=self.kl_bound)

    def begin(self, version: int = 1, share: float = 0.25, *, shadow: bool = False) -> int:
        """Have a canary; returns the sequence of its message."""
        self.publish(0)
        self.settle()
        self.publish(version)
        self.add(PROMOTION_REQUESTED, PromotionRequested(version, share, shadow=shadow))
        assert isinstance(self.settle(), WeightsCanaried)
        return self._sequence

    def turns(self, trial: int, canary: bool, *rewards: float) -> None:
        for number, reward in enumerate(rewards):
            if number % 2:
                end = TurnAdmitted("t", "s", "anna", reward, "user", 1.0, trial=trial, canary=canary)
                self.add(TURN_ADMITTED, end)
            else:
                self.add(TURN_SKIPPED, TurnSkipped("t", "s", "off", trial=trial, canary=canary, reward=reward))


def test_a_canary_that_is_as_good_is_promoted_after_so_many_turns_of_both():
    run = WithCanaries()
    trial = run.begin()
    run.turns(trial, True, 1, 1, 0, 1)
    run.turns(trial, False, 1, 1, 0)
    run.add(TURN_SKIPPED, TurnSkipped("t", "s", "unjudged", trial=trial))  # nothing graded it
    run.turns(trial + 1000, False, 1, 1, 1)  # of another canary
    run.turns(0, False, 1, 1, 1)  # of none
    assert run.decide() is None
    assert run.fold.state.channel.canary.figures()["others_turns"] == 3

    run.turns(trial, False, 1)
    promoted = run.settle()
    assert isinstance(promoted, WeightsPromoted)
    assert (promoted.key, promoted.by, promoted.cause) == ("0:1:d1", "canary", trial)
    assert promoted.reason.startswith("mean reward of its 4 turns 0.75, of 4 others 0.75")
    assert run.decide() is None
    run.ask(None)
    assert run.settle().key == "0:0:d0"


@pytest.mark.parametrize(("reward", "ends"), [(0.9, False), (0.89, True)])
def test_a_canary_is_rolled_back_below_the_others_less_the_margin(reward: float, ends: bool):
    run = WithCanaries(margin=0.125)
    trial = run.begin()
    run.turns(trial, True, *[reward - 0.025] * 4)
    run.turns(trial, False, 1, 1, 1, 1)
    decision = run.settle()

    assert isinstance(decision, CanaryEnded) == ends
    assert run.fold.state.channel.live == ["0:0:d0"] + ([] if ends else ["0:1:d1"])
    assert run.decide() is None
    assert run.fold.state.channel.canary.compared == {}


@pytest.mark.parametrize(("reward", "ends"), [(0.9, False), (0.89, True)])
def test_a_shadow_ends_where_it_is_worse_and_else_waits_for_a_command(reward: float, ends: bool):
    run = WithCanaries(margin=0.125)
    trial = run.begin(shadow=True)
    assert run.fold.state.channel.canary.open.shadow
    for _ in range(4):
        assert run.decide() is None
        pair = TurnSkipped("t", "s", "surplus", trial=trial, reward=1.0, shadow=reward - 0.025)
        run.add(TURN_SKIPPED, pair)
    assert isinstance(run.settle(), CanaryEnded) if ends else run.decide() is None
    assert run.fold.state.channel.live == ["0:0:d0"]
    run.add(PROMOTION_REQUESTED, PromotionRequested(1))
    assert run.settle().by == "command"


def test_turns_that_are_read_before_their_canary_count_and_nothing_is_decided_twice():
    first, second = WithCanaries(), WithCanaries()
    trial = first.begin()
    second.turns(trial, True, 1, 1, 1, 1)  # a supervisor that reads the other log first
    second.turns(trial, False, 1, 1, 1, 1)
    second._sequence = 0
    assert second.begin() == trial
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(second.fold.state), type=SupervisorState)
    assert state.channel == second.fold.state.channel

    assert second.settle().by == "canary"
    second.turns(trial, True, -1, -1, -1, -1)
    assert second.decide() is None


def test_commands_end_a_canary_and_another_one_takes_its_place():
    run = WithCanaries()
    run.begin()
    cause = run.ask(None)
    ended = run.settle()
    assert (ended.by, ended.cause, run.fold.state.channel.live) == ("command", cause, ["0:0:d0"])

    run.publish(2, 3)
    run.add(PROMOTION_REQUESTED, PromotionRequested(2, 0.5))
    run.settle()
    run.add(PROMOTION_REQUESTED, PromotionRequested(3, 0.5))
    assert run.settle().version == 3
    run.ask(2)
    assert run.settle().by == "command"
    assert run.fold.state.channel.canary.open is None


def test_its_version_stays_in_the_store_and_one_that_engines_refuse_is_no_canary_any_more():
    run = WithCanaries()
    trial = run.begin()
    run.publish(*range(2, 20))
    assert run.kept() == [0, 1, 16, 17, 18, 19]

    run.add(WEIGHTS_REFUSED, WeightsRefused("engine-canary-1", 0, 1, 3, "a chunk is missing"))
    ended = run.settle()
    assert (ended.by, ended.cause, ended.reason) == ("weights", trial, "a chunk is missing")
    assert run.kept() == [0, 16, 17, 18, 19]


def test_without_engines_for_it_a_canary_is_refused():
    run = Supervised()
    run.publish(0, 1)
    run.add(PROMOTION_REQUESTED, PromotionRequested(1, 0.5))

    assert "gateway.canary_engines" in run.settle().reason


def test_a_gate_may_begin_a_canary_and_does_not_replace_one():
    run = WithCanaries("accuracy", share=0.25)
    run.publish(0)
    run.settle()
    run.publish(1, 2)
    run.evaluate(0, 1, {1: 9}, 0.9)
    canary = run.settle()
    assert (canary.version, canary.by, canary.share, canary.against) == (1, "gate", 0.25, "0:0:d0")
    run.evaluate(1, 2, {2: 9}, 0.9)
    refused = run.settle()

    assert isinstance(refused, PromotionRefused)
    assert refused.reason == "version 2 passes, and 0:1:d1 is a canary still"


def test_the_newest_version_is_the_next_canary_once_each():
    run = WithCanaries(share=0.25, newest=True)
    run.publish(0)
    run.settle()
    assert run.decide() is None
    run.publish(1, 2)
    canary = run.settle()
    trial = run._sequence
    assert (canary.version, canary.by) == (2, "newest")
    run.publish(3)
    assert run.decide() is None
    run.turns(trial, True, -1, -1, -1, -1)
    run.turns(trial, False, 1, 1, 1, 1)
    assert isinstance(run.settle(), CanaryEnded)

    assert run.settle().version == 3
    run.ask(None)
    run.settle()
    assert run.decide() is None  # each once


def test_replies_that_users_got_are_work_between_two_deaths_of_a_process_and_failed_ones_are_none():
    run = WithCanaries()
    before = run.fold.achieved

    for reason in ("failed", "lost", "gone", "purged"):
        run.add(TURN_SKIPPED, TurnSkipped("t", "s", reason))
    assert run.fold.achieved == before  # an engine that dies at each request is given up

    run.add(TURN_SKIPPED, TurnSkipped("t", "s", "surplus"))  # no learner takes them, and the engine works
    run.add(TURN_ADMITTED, TurnAdmitted("t", "s", "anna", 1.0, "user", 1.0))
    assert run.fold.achieved == before + 2


def test_no_version_beyond_the_bound_gets_users_unless_that_is_forced():
    run = WithCanaries(newest=True)
    run.kl_bound = 0.2
    trial = run.begin()
    for step, nats in ((1, 0.1), (2, 0.6)):
        run.add(BATCH_TRAINED, BatchTrained(step, 0, "rl", {"live_reference_kl": nats}, {}, 0, [0.0, 0.0], 1, step))
    run.turns(trial, True, 1, 1, 1, 1)
    run.turns(trial, False, 1, 1, 1, 1)
    assert isinstance(run.settle(), WeightsPromoted), "version 1 is within it"

    run.publish(2)
    assert (refused := run.settle()) == PromotionRefused("newest", refused.cause, refused.reason)
    assert refused.reason.startswith("version 2 is 0.35 nats per token from the reference on live turns; ")
    run.add(PROMOTION_REQUESTED, PromotionRequested(2))
    assert isinstance(refused := run.settle(), PromotionRefused) and "--force" in refused.reason
    run.add(PROMOTION_REQUESTED, PromotionRequested(2, force=True))
    assert run.settle() == WeightsPromoted(0, 2, "d2", "command", run._sequence - 1)

    run.add(BATCH_TRAINED, BatchTrained(2, 1, "rl", {"live_reference_kl": 0.1}, {}, 0, [0.0, 0.0], 1, 2))
    run.publish(2, lineage=1)  # trained again from a checkpoint
    assert isinstance(run.settle(), WeightsCanaried)


def test_a_version_is_judged_by_the_steps_of_its_own_lineage():
    known = Divergence()
    for lineage, step, nats in ((0, 1, 0.1), (0, 2, 0.1), (0, 3, 5.0), (1, 2, 0.2)):  # trained again from step 1 on
        known.trained(BatchTrained(step, lineage, "rl", {"live_reference_kl": nats}, {}, 0, [0.0, 0.0], 1, step))
    assert known.beyond(0, 3, 1.0).startswith("version 3 is 1.733 nats per token")
    assert known.beyond(1, 2, 0.14).startswith("version 2 is 0.15 nats per token")
    assert not known.beyond(0, 2, 0.14) and not known.beyond(1, 3, 1.0) and not known.beyond(0, 3, 0.0)

    known.trained(BatchTrained(3, 1, "rl", {"live_reference_kl": math.nan}, {}, 0, [0.0, 0.0], 1, 3))
    assert "is nan nats" in known.beyond(1, 3, 1.0) and not known.beyond(1, 2, 1.0)


def rated(run: WithCanaries, version: int, *rewards: float) -> None:
    for reward in rewards:
        run.add(TURN_ADMITTED, TurnAdmitted("t", "s", "anna", reward, "user", 1.0, version=version))


def test_live_reward_moves_the_channel_ahead_and_back_without_a_canary():
    run = WithCanaries()
    run.config.weights.reward = RewardGateSettings(turns=4, margin=0.1)
    run.publish(0)
    assert run.settle().by == "start"
    run.publish(1, 2, 3, 4)
    rated(run, 0, 0.5, 0.5, 0.5, 0.5)

    rated(run, 1, 0.5, 0.5, -0.5)
    assert run.decide() is None, "three turns are too few"
    rated(run, 2, 0.6)
    assert run.decide() is None, "their mean is 0.275, of the turns before it was 0.5"
    rated(run, 2, 0.6, 0.6, 0.6)
    promoted = run.settle()
    assert (promoted.version, promoted.by) == (2, "reward")

    rated(run, 2, 0.0, 0.0, 0.0)
    assert run.decide() is None
    rated(run, 2, 0.0)
    back = run.settle()
    assert (back.version, back.by) == (0, "reward") and back.reason.startswith("back from 0:2:d2: mean reward of its")
    assert run.fold.state.channel.live == ["0:0:d0"]
    assert run.decide() is None

    run.kl_bound = 0.1
    run.add(BATCH_TRAINED, BatchTrained(4, 0, "rl", {"live_reference_kl": 0.5}, {}, 0, [0.0, 0.0], 1, 4))
    rated(run, 4, 1.0, 1.0, 1.0, 1.0)
    assert isinstance(run.settle(), PromotionRefused)
    assert run.decide() is None, "it is not asked for again at once"
