"""Batches for a learner, with tokens that are there, and learners that play inside the test's own process."""

import asyncio
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
import xxhash

from actors.learner.actor import Learner
from actors.learner.group import in_process
from actors.runtime.actor import Context
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.merged_reader import Part, read_merged
from asyncrl.bus.publish import WRITER, publish
from harness.stage import Connect, Stage, until
from topics.batches import BATCH_TRAINED, BatchGroup, BatchMember, BatchPacked, BatchTrained, Objective
from topics.ids import TASK, prompt_name
from topics.prompts import PromptRow
from topics.topic import TRAINING
from topics.trajectories import (
    Reference,
    Segment,
    TrajectoryGenerated,
    count_versions,
)
from topics.weights import CHECKPOINT_SAVED, WEIGHTS_PUBLISHED, CheckpointSaved, WeightsPublished
from topics.wire import decode, encode

_PROMPT, _SAMPLED = 3, 5  # tokens
LEARNING = Objective(learning_rate=1e-6)
SMALL = {"rollout": {"max_new_tokens": 8, "group_size": 2}, "buffer": {"batch_groups": 1, "max_lag": 1}}
Open = Callable[..., "Playing"]


async def pack(
    bus: Bus,
    step: int,
    *,
    rewards: tuple[float, ...] = (0.0, 1.0),
    version: int | None = None,
    objective: Objective = LEARNING,
    estimator: str = "grpo",
) -> int:
    """Store a group's results and the batch that names them; returns its sequence.

    Args:
        version: that sampled it; None for the newest that may have.
        estimator: of its advantages.
    """
    prompt_id, members = prompt_name(TASK, step), []
    rng = np.random.default_rng(step)
    mask = np.array([0] * _PROMPT + [1] * _SAMPLED, np.uint8)
    for member, reward in enumerate(rewards):
        segment = Segment(
            rng.integers(3, 20, len(mask)).astype(np.int32),
            mask,
            np.where(mask, -2.0, 0.0).astype(np.float32),
            np.where(mask, max(0, step - 1) if version is None else version, -1).astype(np.int32),
        )
        message = TrajectoryGenerated(
            trajectory_id=f"{prompt_id}-{member}",
            prompt_id=prompt_id,
            member=member,
            group_size=len(rewards),
            stage="rl",
            rows=[PromptRow("x")],
            segments=[segment],
            completion="y",
            versions=count_versions([segment]),
        )
        sequence = await publish(bus, message)
        body = encode(message)
        reference = Reference(sequence, xxhash.xxh3_64_hexdigest(body), len(body))
        members.append(BatchMember(message.trajectory_id, 0, reference, reward, _SAMPLED))
    group = BatchGroup(prompt_id, members, estimator=estimator)
    packed = BatchPacked(step, "rl", [group], max(0, step - 2), objective)
    return await publish(bus, packed, headers={WRITER: "buffer"})


class Log:
    """Return what the learners published, by topic."""

    def __init__(self) -> None:
        self.messages: dict[str, list] = {}

    def apply(self, topic, message, record):
        self.messages.setdefault(topic.name, []).append(message)

    def refuse(self, record, error):
        pytest.fail(f"{record.subject}: {error}")

    def __getitem__(self, topic):
        return self.messages.get(topic.name, [])


async def log_of(bus: Bus) -> Log:
    log = Log()
    await read_merged(bus, [Part(TRAINING)], log.apply, log.refuse)
    return log


class Playing:
    """A learner at work."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.learner = Learner(context)
        self.task = asyncio.create_task(self.learner.run())

    async def kill(self) -> None:
        """End it as SIGKILL does: without another word."""
        self.context.stop.set()
        self.context.tasks.cancel()
        self.task.cancel()
        await asyncio.wait({self.task})
        await self.learner.keeper.close()


async def trained(bus: Bus, step: int) -> bool:
    """Return whether a step is trained, and its version published."""
    newest = await read_last(bus, BATCH_TRAINED)
    version = await read_last(bus, WEIGHTS_PUBLISHED)
    if newest is None or version is None:
        return False
    return decode(BatchTrained, newest.data).step == step == decode(WeightsPublished, version.data).version


@pytest.fixture
async def opened(connect: Connect, bus: Bus, stage: Callable[..., Stage], monkeypatch) -> AsyncIterator[Open]:
    """Starts learners on the same run, each with a connection of its own, and with its trainer in this process."""
    monkeypatch.setattr("actors.learner.actor.new_group", in_process)
    playing: list[Playing] = []
    stands: list[Stage] = []

    async def open_one(number: int = 1, **tables: object) -> Playing:
        if not stands or tables:
            stands.append(stage(**{**SMALL, "supervision": {"silence_s": 1.0}, **tables}))
            stands[-1].make_model()
        context = stands[-1].context("learner", await connect(bus.run, name=f"learner-{number}"))
        context.actor_id = f"learner-{number}"
        playing.append(Playing(context))
        return playing[-1]

    yield open_one
    for one in playing:
        await one.kill()


async def train(bus: Bus, first: int, last: int) -> None:
    """Pack batches, and wait until they are trained."""
    for step in range(first, last + 1):
        await pack(bus, step)
    await until(lambda: trained(bus, last), f"step {last}")


async def saved(bus: Bus, step: int) -> bool:
    newest = await read_last(bus, CHECKPOINT_SAVED)
    return newest is not None and decode(CheckpointSaved, newest.data).step == step
