"""The buffer as an actor on real logs: whatever the clock of its machine shows, deadlines are the server's."""

import asyncio
import time
from collections.abc import Callable

import pytest

from actors.buffer.actor import main
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import WRITER, publish
from benchmarks.history import History
from harness.stage import Stage, until
from topics.batches import BATCH_PACKED
from topics.groups import GROUP_DROPPED
from topics.prompts import PromptIssued, PromptRow
from topics.topic import Topic
from topics.wire import Message

GROUPS = {"rollout": {"group_size": 2}, "learner": {"steps": 9}}


async def issue(bus: Bus, prompt_id: str) -> None:
    for member in range(2):
        message = PromptIssued(prompt_id=prompt_id, member=member, group_size=2, rows=[PromptRow("x")])
        await publish(bus, message, headers={WRITER: "test"})


async def stands(bus: Bus, topic: Topic[Message]) -> bool:
    return await read_last(bus, topic) is not None


async def test_a_clock_ahead_of_the_servers_ends_no_group(bus: Bus, stage: Callable[..., Stage], monkeypatch):
    context = stage(**GROUPS, buffer={"batch_groups": 1, "group_deadline_s": 600}).context("buffer", bus)
    await issue(bus, "p000001")
    await issue(bus, "p000000")
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() + 601)
    playing = asyncio.create_task(main(context))

    await History(bus, context.config).grade(1)
    await until(lambda: stands(bus, BATCH_PACKED), "the group with grades is packed")

    assert not await stands(bus, GROUP_DROPPED)
    context.stop.set()
    await playing


@pytest.mark.parametrize("off_s", [-601, 601])
async def test_a_group_ends_at_its_deadline_by_the_servers_clock(
    bus: Bus, stage: Callable[..., Stage], monkeypatch, off_s: float
):
    context = stage(**GROUPS, buffer={"batch_groups": 1, "group_deadline_s": 2}).context("buffer", bus)
    true, began = time.time, time.monotonic()
    monkeypatch.setattr(time, "time", lambda: true() + off_s)
    playing = asyncio.create_task(main(context))
    await issue(bus, "p000000")

    await until(lambda: stands(bus, GROUP_DROPPED), "the group is dropped")

    assert time.monotonic() - began >= 2
    context.stop.set()
    await playing
