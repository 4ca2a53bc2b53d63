"""A buffer's fold that is fed by hand."""

from actors.buffer.fold import BufferFold, Plan
from harness.folds import Feed
from topics.batches import Objective


def feed(**changes):
    plan = Plan(
        batch_groups={"warmup": 2, "rl": 2},
        origin=0,
        steps=10,
        max_lag=1,
        ahead=1,
        min_fresh=0.25,
        drop_stale=False,
        reissue=False,
        deadline_s={"warmup": 100.0, "rl": 100.0, "eval": 100.0},
        objective=lambda step: Objective(),
    )
    return Feed(BufferFold(plan._replace(**changes)))
