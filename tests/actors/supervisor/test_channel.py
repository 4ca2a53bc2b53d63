"""The channel `live`: what moves it, what it refuses, and what it keeps in the store."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable

import msgspec
import pytest

from actors.supervisor.actor import Supervisor
from actors.supervisor.fold import SupervisorState
from actors.supervisor.sweeper import purge
from asyncrl.bus.connection import Bus
from harness.channels import Supervised
from harness.stage import Stage
from harness.versions import Versions
from topics.evals import EVAL_REQUESTED, EVAL_SCORED, EvalRequested, EvalScored
from topics.promotions import (
    WEIGHTS_PROMOTED,
    PromotionRefused,
    WeightsPromoted,
)
from topics.topic import WEIGHTS
from topics.weights import (
    WEIGHTS_PUBLISHED,
    WEIGHTS_REFUSED,
    WEIGHTS_STORED,
    WeightsPublished,
    WeightsRefused,
)


def test_a_version_is_promoted_by_command_and_rolled_back_in_one():
    run = Supervised()
    run.publish(0, 1, 2)
    for version in (1, 2):
        cause = run.ask(version)
        decision = run.settle()
        assert (decision.key, decision.by, decision.cause) == (f"0:{version}:d{version}", "command", cause)
    assert run.decide() is None

    run.ask(None)
    back = run.settle()
    run.ask(None)
    nothing = run.settle()

    assert (back.key, back.by, back.reason) == ("0:1:d1", "rollback", "from 0:2:d2")
    assert run.fold.state.channel.live == ["0:1:d1"]
    assert nothing.reason == "there is no version before to go back to"


def test_what_is_live_or_can_be_rolled_back_to_stays_and_one_that_is_gone_is_refused():
    run = Supervised(keep_live=3)
    run.publish(*range(5))
    for version in (0, 1, 2, 3, 4):
        run.ask(version)
        run.settle()
    run.ask(None)
    run.settle()
    run.publish(*range(5, 20))

    assert run.kept() == [2, 3, 16, 17, 18, 19]  # 4 was rolled back from, and three are remembered
    run.ask(5)
    assert "version 5 is not in the store (there: 2, 3, 16, 17, 18, 19)" in run.settle().reason


@pytest.mark.parametrize("store", ["files", "stream"])
async def test_a_rollback_to_a_version_whose_files_are_gone_moves_nothing_and_names_those_that_are_there(
    bus: Bus, stage: Callable[..., Stage], store: str
):
    """A version is gone, too, where what it is a difference to is."""
    context = stage(weights={"store": store, "delta": "always"}).context("supervisor", bus)
    learner, supervisor, run = Versions(bus, context), Supervisor(context), Supervised()
    supervisor.fold = run.fold
    gone = ""
    for version in range(4):
        learner.weights.nudge(0.01, version)
        message = await learner.publish(full=version != 2)
        gone = message.location if version == 1 else gone
        run.add(WEIGHTS_PUBLISHED, message)
    for version in (0, 2, 3):
        run.ask(version)
        run.settle()
    rollback = run.ask(None)
    there = run.decide()
    assert there == await supervisor._if_there(there)

    if store == "files":
        shutil.rmtree(gone)
    else:
        await purge(bus, WEIGHTS, [{"filter": WEIGHTS_STORED.subject(bus.run, gone)}])
    refused = await supervisor._if_there(there)

    assert isinstance(refused, PromotionRefused)
    assert (refused.by, refused.cause) == ("command", rollback)
    assert refused.reason == "version 2 is not in the store (there: 0, 3); the channel does not change"


def test_a_rollback_ends_at_the_oldest_version_that_is_remembered():
    run = Supervised(keep_live=2)
    run.publish(*range(3))
    for version in (0, 1, 2):
        run.ask(version)
        run.settle()
    answers = []
    for _ in range(2):
        run.ask(None)
        answers.append(run.settle())

    assert answers[0].version == 1
    assert answers[1].reason == "there is no version before to go back to"
    assert run.fold.state.channel.live == ["0:1:d1"]


def test_requests_are_answered_once_each_and_in_their_order():
    run = Supervised()
    run.publish(0, 1, 2)
    causes = [run.ask(version) for version in (1, 2, 1, 1, None)]
    answers = [run.settle() for _ in causes]

    assert [answer.cause for answer in answers] == causes
    assert [getattr(answer, "version", 0) for answer in answers] == [1, 2, 1, 0, 2]
    assert answers[3].reason == "version 1 is live already"
    assert run.decide() is None


def test_a_version_that_an_engine_refused_is_not_promoted_until_it_is_there_once_more():
    run = Supervised()
    run.publish(0)
    torn = run.add(WEIGHTS_PUBLISHED, WeightsPublished(0, 1, "d1", "files", "/w/lineage0-v000001-d.delta", "0:0:d0"))
    run.add(WEIGHTS_REFUSED, WeightsRefused("engine-1", 0, 1, torn, "a chunk is missing"))
    run.ask(1)
    refused = run.settle()
    run.add(WEIGHTS_PUBLISHED, WeightsPublished(0, 1, "d1", "files", "/w/lineage0-v000001-d", answers=torn))
    run.ask(1)

    assert refused.reason == "an engine refused version 1: a chunk is missing"
    assert run.settle().key == "0:1:d1"


def test_the_newest_lineage_of_a_version_is_promoted_by_command_and_none_by_an_evaluation():
    run = Supervised(gate_metric="accuracy", gate_threshold=0.5)
    run.publish(0, 1)
    run.publish(1, 2, lineage=1)
    run.evaluate(0, 1, {1: 9}, 1.0)
    judged = run.settle()
    run.ask(1)

    assert "version 1 is on lineages [0, 1]" in judged.reason
    assert run.settle().key == "1:1:d1"


def test_a_request_that_is_not_decided_keeps_its_version():
    run = Supervised()
    run.publish(*range(3))
    run.ask(1)
    run.publish(*range(3, 20))

    assert run.kept() == [1, 16, 17, 18, 19]


def test_the_gate_promotes_what_reaches_its_threshold_and_names_what_does_not():
    run = Supervised(gate_metric="accuracy", gate_threshold=0.6)
    run.publish(*range(6))
    run.evaluate(0, 1, {1: 50, 2: 70}, 0.5)
    low = run.settle()
    run.evaluate(1, 3, {3: 10, 4: 90}, 0.7)
    good = run.settle()
    run.evaluate(2, 2, {2: 5}, 0.9)
    old = run.settle()

    assert low.reason == "accuracy of version 2 is 0.5, weights.gate_threshold is 0.6"
    assert (good.key, good.by) == ("0:4:d4", "gate")
    assert old.reason == "version 2 is not newer than 0:4:d4"
    assert run.decide() is None


def test_the_gate_may_ask_for_a_metric_of_the_reward():
    run = Supervised(gate_metric="format", gate_threshold=0.9)
    run.publish(1, 2)
    run.evaluate(0, 1, {1: 5}, 1.0)
    missing = run.settle()
    run.evaluate(1, 2, {2: 5}, 0.1, format=0.95)

    assert missing.reason == "the evaluation of version 1 has no format"
    assert run.settle().version == 2


@pytest.mark.parametrize(
    ("answered", "accuracy", "reason"),
    [
        ({2: 9}, math.nan, "accuracy of version 2 is nan, weights.gate_threshold is 0.6"),
        ({}, 1.0, "the evaluation of version 1 has no accuracy"),
        ({-1: 9}, 1.0, "the evaluation of version 1 has no accuracy"),
    ],
)
def test_what_is_no_result_promotes_nothing(answered: dict[int, int], accuracy: float, reason: str):
    run = Supervised(gate_metric="accuracy", gate_threshold=0.6)
    run.publish(*range(3))
    run.evaluate(0, 1, answered, accuracy)

    assert run.settle().reason == reason


def test_versions_under_the_oldest_evaluation_stay_until_it_is_judged():
    run = Supervised(gate_metric="accuracy", gate_threshold=0.6)
    run.publish(*range(3))
    run.add(EVAL_REQUESTED, EvalRequested("e000000", 2, 8, 0.0))
    run.publish(*range(3, 20))
    during = run.kept()
    run.add(EVAL_SCORED, EvalScored("e000000", 2, {2: 9}, 0.1, 8, 0, 1.0))
    before = run.kept()
    run.settle()

    assert during == [2, 3, 4, 5, 16, 17, 18, 19]  # as many as learner.keep_versions
    assert before == [2, 16, 17, 18, 19]
    assert run.kept() == [16, 17, 18, 19]


def test_versions_that_engines_of_evaluations_wait_for_stay_until_these_are_scored():
    run = Supervised(engines="held")
    for number in range(6):
        run.publish(*range(5 * number, 5 * number + 5))
        run.add(EVAL_REQUESTED, EvalRequested(f"e{number:06d}", 5 * number + 4, 8, 0.0))
        run.kept()
    run.publish(30, 31)

    assert run.kept() == [4, 9, 14, 19, 28, 29, 30, 31]  # of the oldest learner.keep_versions evaluations
    run.add(EVAL_SCORED, EvalScored("e000001", 9, {9: 5}, 0.1, 8, 0, 1.0))
    assert run.kept() == [4, 14, 19, 28, 29, 30, 31]


def test_without_a_gate_evaluations_move_nothing_and_keep_nothing():
    run = Supervised()
    run.publish(*range(3))
    run.evaluate(0, 1, {1: 5}, 1.0)
    run.publish(*range(3, 20))

    assert run.decide() is None
    assert run.kept() == [16, 17, 18, 19]


def test_a_supervisor_that_died_behind_its_decision_does_not_decide_again_in_any_order_of_the_logs():
    run = Supervised()
    run.publish(0, 1)
    run.add(WEIGHTS_PROMOTED, WeightsPromoted(0, 1, "d1", "command", 4))  # read before the request it answers
    run.ask(1)

    assert run.decide() is None
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(run.fold.state), type=SupervisorState)
    assert state.channel == run.fold.state.channel


def test_only_the_set_that_the_gate_names_is_judged():
    run = Supervised(gate_metric="pass@2", gate_threshold=0.6, gate_set="hard")
    run.publish(0, 1)
    for number, dataset in enumerate(("easy", "hard")):
        scored = EvalScored(f"e{number:06d}", 1, {1: 5}, 0.1, 8, 0, 1.0, metrics={"pass@2": 0.9}, dataset=dataset)
        run.add(EVAL_SCORED, scored)

    assert [score.value for score in run.fold.state.channel.scores.values()] == [0.9]


def test_where_engines_serve_the_channel_the_newest_version_is_live_from_the_start_and_once():
    run = Supervised()
    assert run.decide(serves=True) is None
    run.publish(0, 1)
    first = run.settle(serves=True)
    run.publish(2)

    assert (first.key, first.by) == ("0:1:d1", "start")
    assert run.decide(serves=True) is None
    asked = run.ask(2)
    assert (run.settle(serves=True).key, run.fold.state.channel.answered) == ("0:2:d2", {"command": asked})
    run.ask(None)
    assert run.settle(serves=True).key == "0:1:d1"
