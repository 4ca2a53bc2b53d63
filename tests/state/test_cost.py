"""The cost of a run, from messages whose hours and tokens are counted by hand."""

from asyncrl.cli.cost import cost_text
from asyncrl.state.cost import CostFold
from harness.folds import Feed
from topics.actors import ActorStarted, ActorStopped, RunOpened
from topics.batches import BatchPacked, BatchTrained
from topics.engines import EngineReady, EngineUpdating
from topics.groups import GroupDropped

HOUR_S = 3600.0
ON_GPUS = {
    "learner": {"device": "cuda", "ranks": 2, "steps": 10},
    "engine": {"kind": "sglang", "count": 1, "arguments": ["--tp", "4"]},
}


def trained(step: int, *, wait_s: float, train_s: float) -> BatchTrained:
    metrics = {"train_s": train_s, "wait_s": wait_s, "fetch_s": 2.0, "publish_s": 1.0}
    return BatchTrained(step, 0, "rl", metrics, {0: 600, 1: 200}, 100, [0.5, 0.1], 8, step)


def fed(*, wait_s: float = 30.0, train_s: float = 60.0) -> Feed:
    """Feed two hours with two learners, one of them a standby, and one engine that died after an hour."""
    feed = Feed(CostFold())
    feed.publish(RunOpened(10, 0, ON_GPUS), at_s=1.0)
    for actor_id in ("learner-1", "learner-2", "engine-1", "rollout-1"):
        feed.publish(ActorStarted(actor_id.rsplit("-", 1)[0], actor_id, "here", 1), at_s=1.0)
    feed.publish(EngineUpdating("engine-1", 0, 1), at_s=50.0)
    feed.publish(EngineReady("engine-1", "http://here:1", 0, 1, "made", 16, pause_s=4.0), at_s=60.0)
    feed.publish(BatchPacked(1, "rl", [], 0, figures={"discarded_tokens": 50.0}), at_s=80.0)
    feed.publish(trained(1, wait_s=wait_s, train_s=train_s), at_s=101.0)
    feed.publish(GroupDropped("p000007", "lag", 8, 50), at_s=102.0)
    feed.publish(trained(2, wait_s=wait_s, train_s=train_s), at_s=211.0)
    feed.publish(ActorStopped("engine", "engine-1", "out of memory"), at_s=1.0 + HOUR_S)
    for actor_id in ("rollout-1", "learner-2", "learner-1"):
        feed.publish(ActorStopped(actor_id.rsplit("-", 1)[0], actor_id), at_s=1.0 + 2 * HOUR_S)
    feed.fold.end(feed.fold.last_ns)
    return feed


def test_gpu_hours_tokens_and_seconds_are_those_of_the_logs():
    cost = fed().fold.cost("mine", 3.0, {})

    assert cost.wall_h == 2.0
    assert cost.gpu_h == {"learner": 4.0, "engine": 4.0}  # 2 GPUs for 2 h, 4 GPUs for 1 h; the standby takes none
    assert cost.process_h == {"learner": 4.0, "engine": 1.0, "rollout": 2.0}
    assert cost.tokens == {"trained": 1600, "stale": 200, "discarded": 50, "dropped: lag": 50}
    # From 90 s before the first step to the second.
    assert list(cost.learner_s.values()) == [120.0, 60.0, 4.0, 2.0, 0.0, 14.0]
    assert list(cost.engine_s.values()) == [4.0, 6.0, 3590.0]
    assert cost.price == 24.0
    assert cost.price_per_million_trained_tokens == 15_000.0
    assert "8.00 h (engine 4.00, learner 4.00)" in cost_text(cost)


def test_the_side_that_is_waited_for_is_to_be_scaled():
    def first(wait_s: float, train_s: float, **waiting: int) -> str:
        return fed(wait_s=wait_s, train_s=train_s).fold.cost("mine", None, waiting).scale_first.partition(":")[0]

    assert first(80.0, 20.0) == "engine"
    assert first(80.0, 20.0, reward=64, rollout=2) == "reward"
    assert first(1.0, 99.0) == "learner"
    assert first(20.0, 80.0) == "nothing"


def test_the_time_for_which_a_killed_run_lay_stopped_costs_nothing():
    feed = Feed(CostFold())
    feed.publish(RunOpened(10, 0, ON_GPUS), at_s=1.0)
    feed.publish(ActorStarted("learner", "learner-1", "here", 1), at_s=1.0)
    feed.publish(trained(1, wait_s=1.0, train_s=1.0), at_s=1.0 + HOUR_S)  # the last message before a power cut
    feed.publish(RunOpened(10, 0, ON_GPUS), at_s=1.0 + 9 * HOUR_S)
    feed.publish(ActorStarted("learner", "learner-1", "here", 2), at_s=1.0 + 9 * HOUR_S)
    feed.publish(ActorStopped("learner", "learner-1"), at_s=1.0 + 10 * HOUR_S)
    feed.fold.end(feed.fold.last_ns)

    cost = feed.fold.cost("mine", None, {})

    assert (cost.wall_h, cost.gpu_h, cost.price) == (2.0, {"learner": 4.0}, None)
