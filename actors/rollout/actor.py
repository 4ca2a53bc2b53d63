"""The rollout worker: runs rollout functions on engines, publishes progress and results, resumes others' work."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from actors.rollout.ended import EVERY, EndedCache
from actors.rollout.execution import Execution
from actors.rollout.slot_gate import SlotGate
from actors.rollout.slots import SlotSearch
from actors.rollout.tools import Tools
from actors.runtime.actor import Context
from actors.runtime.delivery import Delivery
from actors.runtime.engines import follow_fleet
from actors.runtime.worker import Produced, WorkerLoop
from asyncrl.algorithms.lag import USUAL_SIGMA
from asyncrl.bus.log import Record, last_sequence
from asyncrl.config.slots import LEAST, first_slots, most_slots, requests_at_once, rollout_workers
from asyncrl.rollout.journal import branch_tasks
from topics.groups import GROUP_DROPPED, GroupDropped
from topics.ids import prompt_of
from topics.prompts import PromptIssued
from topics.topic import BATCHES, PROMPTS, Topic
from topics.trajectories import TRAJECTORY_DROPPED, TrajectoryDropped

_FOLLOWED_S = 1.0  # between two looks at the slots


async def main(context: Context) -> None:
    """Run a rollout worker until asked to stop."""
    await RolloutWorker(context).run()


class RolloutWorker:
    """Runs many trajectories at once, one task each.

    Those in a slot work, and sample. For `sandbox.ready` more the sandboxes are prepared, or the tests run.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        slots, self._ready = first_slots(context.config), context.config.sandbox.ready
        self.loop = WorkerLoop(context, self.handle, slots + self._ready, counts_runs=True)
        self._gate = SlotGate(slots)
        self.tools = Tools(context, self.loop.isolation)
        self._requests = requests_at_once(context.config)
        least = min(slots, -(-LEAST // rollout_workers(context.config)))
        self._search = SlotSearch(least, self._most_slots)
        self._ends = EndedCache()
        self._old_work = 0  # sequence of the newest prompt issued before this worker listened
        self._working: dict[str, tuple[int, Delivery[PromptIssued]]] = {}  # attempt and lease, by trajectory
        self._ends_listener = context.listen(BATCHES, self._on_end, [TRAJECTORY_DROPPED, GROUP_DROPPED])

    async def run(self) -> None:
        """Work until asked to stop."""
        branch_tasks(asyncio.get_running_loop())
        opponents = contextlib.AsyncExitStack()
        await self.tools.opponent.open(opponents)
        engines = [await follow_fleet(self.context, self.tools.fleet)]
        if self.tools.eval_fleet is not self.tools.fleet:
            engines.append(await follow_fleet(self.context, self.tools.eval_fleet, "evaluations"))
        # The ends that are on the log by now are of work that was issued before: it is looked up when it comes.
        await self._ends_listener.start(after=await last_sequence(self.context.bus, BATCHES))
        self._old_work = await last_sequence(self.context.bus, PROMPTS)
        self.context.tasks.start(self._follow_slots())
        await self.loop.run()
        await self._ends_listener.close()
        for listener in engines:
            await listener.close()
        await self.tools.close()
        await opponents.aclose()
        await self.tools.fleet.close()
        await self.tools.eval_fleet.close()

    async def _follow_slots(self) -> None:
        """Report the slots; let `auto` hold as many trajectories as end in time and speed the engines up."""
        vitals, gate = self.context.vitals, self._gate
        while True:
            await asyncio.sleep(_FOLLOWED_S)
            if self.context.config.rollout.slots == "auto":
                working = min(self.loop.held, gate.slots)
                slots = self._search.decide(time.monotonic(), int(vitals.get("tokens", 0)), working)
                self.loop.resize(slots + self._ready)
                gate.resize(slots)
            vitals.update(gate.vitals())

    def _most_slots(self, sigma: float | None) -> int:
        self._requests = max(self._requests, self.tools.fleet.slots)  # an engine that loads a version comes back
        return most_slots(self.context.config, self._requests, sigma=USUAL_SIGMA if sigma is None else sigma)

    async def handle(self, issued: PromptIssued, delivery: Delivery[PromptIssued]) -> Produced:
        """Finish one trajectory, unless another worker did, or it ended while it waited in the queue."""
        self.tools.rows.learn(issued)
        look = self._may_exist(delivery, issued)
        self._working[issued.trajectory_id] = (issued.attempt, delivery)
        try:
            looks_up = look or self._ends.may_be_incomplete(delivery.record.time_ns)
            if self._ends.include(issued) or (looks_up and await self._ends.look_up(self.context.bus, issued)):
                self.context.count("ended_unworked")
                return []
            gate = None if issued.stage == "eval" else self._gate
            produced = await Execution(self.tools, issued, delivery, gate).run(look=look)
            if issued.stage == "rl":
                self._search.ended(delivery.tokens)
            return produced
        finally:
            if self._working.get(issued.trajectory_id, (0, None))[1] is delivery:
                del self._working[issued.trajectory_id]

    def _may_exist(self, delivery: Delivery[PromptIssued], issued: PromptIssued) -> bool:
        """Return whether another worker may have worked on it before.

        A first delivery of a message issued while this worker was subscribed, on a connection that never broke, is new.
        Should that be wrong after all, the fence refuses the result.
        """
        fresh = delivery.at.num_delivered == 1 and issued.attempt == 0 and self.context.bus.reconnects == 0
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
