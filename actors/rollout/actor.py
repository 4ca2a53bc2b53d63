"""The rollout worker: runs rollout functions on engines, publishes progress and results, resumes others' work."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from actors.rollout.execution import Execution, Tools
from actors.runtime.actor import Context
from actors.runtime.delivery import Delivery
from actors.runtime.engines import follow_fleet
from actors.runtime.worker import Produced, WorkerLoop
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import Record, last_sequence, read_last_of_each
from asyncrl.bus.publish import unpack
from asyncrl.rollout.journal import branch_tasks
from topics.groups import GROUP_DROPPED, GroupDropped
from topics.ids import prompt_of
from topics.prompts import PromptIssued
from topics.topic import BATCHES, PROMPTS, Topic
from topics.trajectories import TRAJECTORY_DROPPED, TrajectoryDropped
from topics.wire import WireError

EVERY = 1 << 31  # more than any attempt: a group ends with all of them
_MOST = 16_384  # ends that are kept; the log has the others


class Ends:
    """The newest ends that came while this worker listened: its memory does not grow with the run."""

    def __init__(self, most: int = _MOST) -> None:
        self._known: dict[str, tuple[int, int]] = {}  # newest attempt that has ended, and when; the newest last
        self._most = most
        self._forgotten_ns = -1  # when the newest of the ends that were evicted was stored

    def add(self, message: GroupDropped | TrajectoryDropped, time_ns: int) -> None:
        """Note an end.

        Args:
            time_ns: server's clock when it was stored.
        """
        if isinstance(message, GroupDropped):
            key, attempt = message.prompt_id, EVERY
        else:
            key, attempt = message.trajectory_id, message.attempt
        before, _ = self._known.pop(key, (-1, 0))
        self._known[key] = (max(attempt, before), time_ns)
        if len(self._known) > self._most:
            _, forgotten_ns = self._known.pop(next(iter(self._known)))
            self._forgotten_ns = max(self._forgotten_ns, forgotten_ns)

    def include(self, issued: PromptIssued) -> bool:
        """Return whether this attempt has ended, as far as is known here."""
        own, _ = self._known.get(issued.trajectory_id, (-1, 0))
        of_group, _ = self._known.get(issued.prompt_id, (-1, 0))
        return issued.attempt <= max(own, of_group)

    def may_miss(self, issued_ns: int) -> bool:
        """Return whether an end may be on the log alone of what was issued at that time of the server's clock."""
        return issued_ns <= self._forgotten_ns

    async def look_up(self, bus: Bus, issued: PromptIssued) -> bool:
        """Return whether the log has an end of this attempt."""
        subjects = [
            TRAJECTORY_DROPPED.subject(bus.run, issued.trajectory_id),
            GROUP_DROPPED.subject(bus.run, issued.prompt_id),
        ]
        found = Ends()
        for record in await read_last_of_each(bus, BATCHES, subjects):
            with contextlib.suppress(WireError):  # the recorder of the log keeps it as a dead letter
                found.add(unpack(record, record.data)[1], record.time_ns)
        return found.include(issued)


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
        engines = [await follow_fleet(self.context, self.tools.fleet)]
        if self.tools.eval_fleet is not self.tools.fleet:
            engines.append(await follow_fleet(self.context, self.tools.eval_fleet, "evaluations"))
        # The ends that are on the log by now are of work that was issued before: it is looked up when it comes.
        await self._ends_listener.start(after=await last_sequence(self.context.bus, BATCHES))
        self._old_work = await last_sequence(self.context.bus, PROMPTS)
        await self.loop.run()
        await self._ends_listener.close()
        for listener in engines:
            await listener.close()
        await self.tools.fleet.close()
        await self.tools.eval_fleet.close()

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
            ended = [name for name in self._working if prompt_of(name) == message.prompt_id]
        else:
            attempt, _ = self._working.get(message.trajectory_id, (EVERY, None))
            ended = [message.trajectory_id] if attempt <= message.attempt else []
        for name in ended:
            self.context.count("stopped")
            self._working.pop(name)[1].end(done=True)
