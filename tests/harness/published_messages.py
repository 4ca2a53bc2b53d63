"""Messages as actors publish them, to be looked at by commands."""

import numpy as np

from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from topics.actors import ActorStarted, ActorStopped
from topics.batches import BatchTrained
from topics.prompts import PROMPT_ISSUED
from topics.trajectories import Segment, TrajectoryGenerated, VersionCount


def generated(name: str = "p000042-3", length: int = 11) -> TrajectoryGenerated:
    zeros = np.zeros(length, np.float32)
    segment = Segment(
        tokens=np.arange(length, dtype=np.int32),
        mask=np.ones(length, np.uint8),
        logprobs=zeros,
        versions=zeros.astype(np.int32),
    )
    return TrajectoryGenerated(
        trajectory_id=name,
        prompt_id=name.split("-")[0],
        member=3,
        group_size=8,
        stage="rl",
        rows=[],
        segments=[segment],
        completion="hello world",
        versions=[VersionCount(0, length)],
    )


def trained(step: int) -> BatchTrained:
    return BatchTrained(
        step=step,
        lineage=0,
        stage="rl",
        metrics={"train_s": float(step), "wait_s": 0.5},
        lags={0: 60, 1: 40},
        masked=0,
        rewards=[0.5, 0.1],
        trajectories=8,
        batch_sequence=step,
    )


async def publish_started(bus: Bus, actor_id: str) -> None:
    message = ActorStarted(actor_id.rsplit("-", 1)[0], actor_id, "here", 1)
    await publish(bus, message)


async def publish_stopped(bus: Bus, actor_id: str, reason: str = "") -> None:
    message = ActorStopped(actor_id.rsplit("-", 1)[0], actor_id, reason, again=bool(reason))
    await publish(bus, message)


async def issue(bus: Bus, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        await bus.store(PROMPT_ISSUED.subject(bus.run, f"p{number:06d}-0"), b"", {})
