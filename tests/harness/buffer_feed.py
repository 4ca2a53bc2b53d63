"""A buffer's fold that is fed by hand."""

from actors.buffer.fold import BufferFold
from actors.buffer.state import Plan
from asyncrl.config.held_out import HeldOut
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
        objective=lambda step, stage: Objective(),
        held_out={"": HeldOut("", 3, 1, 0.0, 8, [], 1.0)},
        stages=[],
    )
    return Feed(BufferFold(plan._replace(**changes)))
