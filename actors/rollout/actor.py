"""The rollout worker: runs rollout functions on engines, publishes progress and results, resumes others' work."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.rollout.ends import EVERY, Ends
from actors.rollout.execution import Execution, Tools
from actors.runtime.actor import Context
from actors.runtime.delivery import Delivery
from actors.runtime.engines import follow_fleet
from actors.runtime.worker import Produced, WorkerLoop
from asyncrl.bus.log import Record, last_sequence
from asyncrl.rollout.journal import branch_tasks
from topics.groups import GROUP_DROPPED, GroupDropped
from topics.prompts import PromptIssued
from topics.topic import BATCHES, PROMPTS, Topic
from topics.trajectories import TRAJECTORY_DROPPED, TrajectoryDropped


async def main(context: Context) -> None:
    """Run a rollout worker until asked to stop."""
    worker = RolloutWorker(context)
    await worker.run()


class RolloutWorker:
    """Many trajectories at once, each a task of its own."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.loop = WorkerLoop(context, self.handle, context.config.rollout.slots, counts_runs=True)
        self.tools = Tools(context, self.loop.isolation)
        self._ends = Ends()
        self._old_work = 0  # sequence of the newest prompt issued before this worker listened
        self._working: dict[str, tuple[int, Delivery[PromptIssued]]] = {}  # attempt and lease, by trajectory
        self._ends_listener = context.listen(BATCHES, self._on_end, [TRAJECTORY_DROPPED, GROUP_DROPPED])

    async def run(self) -> None:
        """Work until asked to stop."""
        branch_tasks(asyncio.get_running_loop())
        engines = await follow_fleet(self.context, self.tools.fleet)
        # The ends that are on the log by now are of work that was issued before: it is looked up when it comes.
        await self._ends_listener.start(after=await last_sequence(self.context.bus, BATCHES))
        self._old_work = await last_sequence(self.context.bus, PROMPTS)
        await self.loop.run()
        await self._ends_listener.close()
        await engines.close()
        await self.tools.fleet.close()

    async def handle(self, issued: PromptIssued, delivery: Delivery[PromptIssued]) -> Produced:
        """Finish one trajectory, unless another worker did, or it ended while it waited in the queue."""
        self.tools.rows.learn(issued)
        look = self._must_look(delivery, issued)
        self._working[issued.trajectory_id] = (issued.attempt, delivery)
        try:
            looks_up = look or self._ends.may_miss(delivery.record.time_ns)
            if self._ends.include(issued) or (looks_up and await self._ends.look_up(self.context.bus, issued)):
                self.context.count("ended_unworked")
                return []
            return await Execution(self.tools, issued, delivery).run(look=look)
        finally:
            if self._working.get(issued.trajectory_id, (0, None))[1] is delivery:
                del self._working[issued.trajectory_id]

    def _must_look(self, delivery: Delivery[PromptIssued], issued: PromptIssued) -> bool:
        """Return whether another worker may have worked on it before.

        A first delivery of a message issued while this worker was subscribed, on a connection that never broke, is new.
        Should that be wrong after all, the fence refuses the result.
        """
        fresh = delivery.at.deliveries == 1 and issued.attempt == 0 and self.context.bus.reconnects == 0
        return not fresh or delivery.at.stream_sequence <= self._old_work

    def _on_end(self, _topic: Topic[Any], message: GroupDropped | TrajectoryDropped, record: Record) -> None:
        """Stop work on what the buffer has ended."""
        self._ends.add(message, record.time_ns)
        if isinstance(message, GroupDropped):
            ended = [name for name in self._working if name.rsplit("-", 1)[0] == message.prompt_id]
        else:
            attempt, _ = self._working.get(message.trajectory_id, (EVERY, None))
            ended = [message.trajectory_id] if attempt <= message.attempt else []
        for name in ended:
            self.context.count("stopped")
            self._working.pop(name)[1].end(done=True)
