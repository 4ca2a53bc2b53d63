"""The number of slots of a worker changes while it works."""

import asyncio
from collections.abc import Callable
from typing import Any

from actors.runtime.delivery import Delivery
from actors.runtime.worker import WorkerLoop
from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from harness.stage import Stage, until
from topics.prompts import PromptIssued, PromptRow


async def test_a_worker_with_fewer_slots_gives_its_youngest_work_back(bus: Bus, stage: Callable[..., Stage]):
    begun: list[str] = []
    returned: list[str] = []
    release = asyncio.Event()

    async def handle(message: PromptIssued, delivery: Delivery[PromptIssued]) -> Any:
        begun.append(message.trajectory_id)
        try:
            await release.wait()
        except asyncio.CancelledError:
            returned.append(message.trajectory_id)
            raise
        return []

    for number in range(6):
        row = [PromptRow("^ab=", "ba")]
        await publish(bus, PromptIssued(prompt_id=f"p{number:06d}", member=0, group_size=1, rows=row))
    context = stage(workers={"lease_s": 60}).context("rollout", bus)
    loop: WorkerLoop[PromptIssued] = WorkerLoop(context, handle, 4)
    task = asyncio.create_task(loop.run())
    try:
        await until(lambda: len(begun) == 4, "the slots are full")
        loop.resize(2)
        await until(lambda: loop.held == 2, "two pieces are back in the queue")
        assert returned == begun[2:4]

        loop.resize(3)
        await until(lambda: len(begun) == 5, "one of them begins again")
        assert begun[4] in returned
        assert loop.held == 3
        release.set()
        await until(lambda: len(begun) == 8 and not loop.held, "all work is done")
    finally:
        context.stop.set()
        await asyncio.wait_for(task, 120)
