"""A piece of work, leased to this worker: its lease, its fence, and its result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from nats.aio.msg import Msg

from actors.runtime.actor import Context
from asyncrl.bus.log import Record, read_newest
from asyncrl.bus.publish import Fenced, attempt_of, publish, publish_if_latest
from asyncrl.bus.pull import Position
from topics.actors import HeldWork, Waiting
from topics.ids import member_of, prompt_of
from topics.prompts import LIVE_TASK, ONLY_TASK
from topics.topic import Topic
from topics.trajectories import TrajectoryFailed
from topics.wire import Message

M = TypeVar("M", bound=Message)

PUBLISHING = Waiting("publish")  # a message has nats.publish_deadline_s to be stored


_ACTIVITIES = {"engine": "generate", "version": "hold", "retry": "hold", "tool": "tool", "publish": "store"}


@dataclass(slots=True, eq=False)
class Delivery(Generic[M]):
    """One piece of work, leased to this worker."""

    _context: Context
    record: Record
    at: Position
    message: Msg
    began_at: float = field(default_factory=time.monotonic)
    advanced_at: float = field(default_factory=time.monotonic)
    renewed_at: float = field(default_factory=time.monotonic)
    lost: bool = False  # its lease ran out once
    seconds: dict[str, float] = field(default_factory=dict)  # by activity, up to its newest change
    _waits_for: Waiting = field(default_factory=Waiting)
    _waits_since: float = field(default_factory=time.monotonic)
    tokens: int = 0  # sampled so far
    discarded: int = 0  # sampled, and part of no answer
    verified: int = 0  # sampled by engines that draft
    passes: int = 0  # forward passes in which these engines verified drafted tokens
    waiting_on_others: int = 0  # parts of it that are waited for elsewhere, so that it does not count as hung
    task: asyncio.Task[None] | None = None
    fence: int = 0  # sequence of the newest message about this work, on a topic with a fence
    settled: bool = False  # the result is being published: nothing interrupts that
    returning: bool = False  # its worker gives it back: it has too many
    verdict: bool | None = None  # why it was ended from outside: done, or taken over by another worker
    _reconnects: int = -1  # of the connection, when the fence was last known to be held here

    @property
    def name(self) -> str:
        """The key of its message: the trajectory."""
        return self.record.key

    @property
    def waits_for(self) -> Waiting:
        """The cause for which it waits, for the vital signs."""
        return self._waits_for

    @waits_for.setter
    def waits_for(self, cause: Waiting) -> None:
        """Set the cause, and count the seconds of the one before."""
        now, activity = time.monotonic(), _ACTIVITIES.get(self._waits_for.on, "other")
        self.seconds[activity] = self.seconds.get(activity, 0.0) + now - self._waits_since
        self._waits_for, self._waits_since = cause, now

    @property
    def spans(self) -> str:
        """Its seconds so far by activity, as `trajectory.generated` has them."""
        self.waits_for = self._waits_for  # count the current activity up to now
        return ",".join(f"{activity}:{seconds:.4f}" for activity, seconds in sorted(self.seconds.items()))

    def end(self, *, done: bool) -> None:
        """Stop the work: it is done (and will be acknowledged), or another worker has it."""
        self.verdict = done
        self.cancel()

    def cancel(self) -> None:
        """Stop the work, unless its outcome is being published."""
        if self.task is not None and not self.settled:
            self.task.cancel()

    async def publish(self, message: Message) -> None:
        """Publish a partial or the final result of the work.

        Raises:
            Fenced: another worker has continued the work.
            BusError: it cannot be stored.
        """
        with self.waiting(PUBLISHING):
            if self._context.bus.tables.topic_for(message).fenced:
                reconnects = self._context.bus.reconnects
                self.fence = await publish_if_latest(self._context.bus, message, self.fence, task=self._task)
                self._reconnects = reconnects
            else:
                await publish(self._context.bus, message)

    async def newest(self, topic: Topic[Any]) -> Record | None:
        """Read the newest message inside the fence of the work, which a topic has."""
        bus = self._context.bus
        pool = bus.tables.pool_name(topic, self._task)
        return await read_newest(bus, topic.stream, topic.fence(bus.run, self.name, pool))

    @property
    def _task(self) -> str:
        """The task of an issued prompt; the subjects of other work name no pool."""
        return self.record.headers.get("task", ONLY_TASK)

    @property
    def holds_fence(self) -> bool:
        """Return whether no other worker can have taken it over since the fence was last known to be held here."""
        return not self.lapsed and self._context.bus.reconnects == self._reconnects

    async def check_fence(self, topic: Topic[Any]) -> None:
        """Ask the server, where the lease has run out once, or a server that lost it may have given it to another.

        Raises:
            Fenced: another worker has continued the work.
        """
        if self.holds_fence:
            return
        reconnects, newest = self._context.bus.reconnects, await self.newest(topic)
        if newest is None or newest.sequence != self.fence:
            raise Fenced(f"{self.name}: another worker has taken over this work")
        self._reconnects = reconnects

    def advanced(self) -> None:
        """The work came further: its lease deserves renewal."""
        self.advanced_at = time.monotonic()

    @contextmanager
    def waiting(self, waits_for: Waiting) -> Iterator[None]:
        """Count this block as waiting: it has its own limit or waits for others, so it does not mean that the work
        hangs."""
        self.waiting_on_others += 1
        self.waits_for = waits_for
        try:
            yield
        finally:
            self.waiting_on_others -= 1
            if self.waits_for == waits_for:
                self.waits_for = Waiting()
            self.advanced()

    def vitals_entry(self, now: float) -> HeldWork:
        """Return its entry in the vital signs."""
        held_s, quiet_s = round(now - self.began_at, 1), round(now - self.advanced_at, 1)
        return HeldWork(self.name, held_s, quiet_s, self.waits_for, self.tokens)

    @property
    def lapsed(self) -> bool:
        """Return whether the lease has run out once, as while a process is frozen: another worker may have the work."""
        return self.lost or time.monotonic() > self.renewed_at + self._context.config.workers.lease_s

    async def renew(self) -> None:
        """Keep the lease for another term."""
        self.lost, self.renewed_at = self.lapsed, time.monotonic()
        await self._context.bus.send(self.message.reply, b"+WPI")

    def granted_again(self, message: Msg) -> None:
        """Note a delivery to the same worker. One that was frozen cannot know when: a lapsed lease stays lapsed."""
        self.lost, self.message, self.renewed_at = self.lapsed, message, time.monotonic()

    async def give_back(self) -> None:
        """Give it back for immediate redelivery."""
        await self._context.bus.send(self.message.reply, b"-NAK")


def purged_claim(record: Record, num_delivered: int, detail: str) -> TrajectoryFailed:
    """Return the claim that nothing will come of a turn of live traffic, which is a group of one."""
    return TrajectoryFailed(
        trajectory_id=record.key,
        attempt=attempt_of(record) or 0,
        delivery=num_delivered,
        prompt_id=prompt_of(record.key),
        member=member_of(record.key),
        group_size=1,
        stage="rl",
        task=LIVE_TASK,
        reason="purged",
        detail=detail,
    )
